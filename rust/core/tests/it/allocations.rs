//! Files decide how much memory their parsers ask for, so every such request can fail: `memory::bytes(n)?` and its neighbours. The
//! standard ways abort the process; parsers use them only for as many elements as a list in memory has, or for a constant number.

use syn::visit::{self, Visit};

use crate::sources::sources;

/// Modules whose numbers come from files.
const PARSERS: [&str; 5] = ["parse", "codec", "files", "layout", "arrays"];

#[derive(Default)]
struct Requests {
    found: Vec<(usize, String)>,
}

/// Whether a number of elements is a constant, or that of a list.
fn is_bounded(text: &str) -> bool {
    let is_constant = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || "_<+ ".contains(c);
    text.contains(". len ()") || text.contains(".len()") || text.chars().all(is_constant)
}

impl Requests {
    fn add(&mut self, span: proc_macro2::Span, count: &str) {
        if !is_bounded(count) {
            self.found.push((span.start().line, count.to_string()));
        }
    }
}

fn text(tokens: impl IntoIterator<Item = proc_macro2::TokenTree>) -> String {
    tokens.into_iter().collect::<proc_macro2::TokenStream>().to_string()
}

impl<'a> Visit<'a> for Requests {
    fn visit_item_mod(&mut self, item: &'a syn::ItemMod) {
        if item.ident != "tests" && item.ident != "models" {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_macro(&mut self, item: &'a syn::Macro) {
        if item.path.is_ident("vec") {
            let tokens: Vec<_> = item.tokens.clone().into_iter().collect();
            let is_semicolon = |token: &proc_macro2::TokenTree| matches!(token, proc_macro2::TokenTree::Punct(p) if p.as_char() == ';');
            if let Some(at) = tokens.iter().position(is_semicolon) {
                self.add(item.path.segments[0].ident.span(), &text(tokens[at + 1..].to_vec()));
            }
        }
    }

    fn visit_expr_call(&mut self, call: &'a syn::ExprCall) {
        if let syn::Expr::Path(function) = &*call.func
            && let Some(name) = function.path.segments.last().filter(|name| name.ident == "with_capacity")
            && let Some(count) = call.args.first()
        {
            let lines = count_text(count);
            self.add(name.ident.span(), &lines);
        }
        visit::visit_expr_call(self, call);
    }

    fn visit_expr_method_call(&mut self, call: &'a syn::ExprMethodCall) {
        if (call.method == "resize" || call.method == "reserve")
            && let Some(count) = call.args.first()
        {
            self.add(call.method.span(), &count_text(count));
        }
        visit::visit_expr_method_call(self, call);
    }
}

/// The text of an expression, as far as [`is_bounded`] looks at it.
fn count_text(count: &syn::Expr) -> String {
    match count {
        syn::Expr::Lit(_) => "1".to_string(),
        syn::Expr::Path(path) => path.path.segments.last().map_or(String::new(), |name| name.ident.to_string()),
        syn::Expr::MethodCall(call) if call.method == "len" => ".len()".to_string(),
        syn::Expr::Binary(both) => {
            let sides = [count_text(&both.left), count_text(&both.right)];
            if sides.iter().all(|side| is_bounded(side)) { "1".to_string() } else { sides.concat() }
        }
        syn::Expr::Cast(cast) => count_text(&cast.expr),
        syn::Expr::Paren(paren) => count_text(&paren.expr),
        _ => "an expression".to_string(),
    }
}

fn requests(text: &str) -> Vec<(usize, String)> {
    let mut requests = Requests::default();
    requests.visit_file(&syn::parse_file(text).unwrap());
    requests.found
}

#[test]
fn parsers_ask_for_memory_that_may_be_refused() {
    let mut found = vec![];
    for (path, text) in sources("core/src") {
        if PARSERS.iter().any(|folder| path.starts_with(folder)) {
            found
                .extend(requests(&text).into_iter().map(|(line, count)| format!("{}:{line}: {count}", path.display())));
        }
    }
    assert!(found.is_empty(), "use memory::bytes, memory::zeroed or memory::reserve:\n{}", found.join("\n"));
}

#[test]
fn the_check_sees_what_it_forbids() {
    for body in [
        "vec![0; n]",
        "Vec::with_capacity(n as usize)",
        "v.resize(n + 1, 0)",
        "vec![0; region.stored as usize]",
        "v.reserve(n)",
    ] {
        assert_eq!(requests(&format!("fn f() {{ let a = {body}; }}")).len(), 1, "{body}");
    }
    for body in
        ["vec![0; 4]", "vec![0u8; MOST]", "Vec::with_capacity(list.len() + 1)", "vec![0; list.len()]", "vec![1, 2]"]
    {
        assert_eq!(requests(&format!("fn f() {{ let a = {body}; }}")).len(), 0, "{body}");
    }
}
