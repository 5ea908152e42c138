//! Names and sizes in the core, the remote stores and the binding: type names are unique, and files and functions are
//! short.

use std::collections::{BTreeMap, BTreeSet};

use crate::sources::sources;
use syn::visit::{self, Visit};

/// Names shared by two types, with the reason.
const TWICE: &[(&str, &str)] = &[
    ("AnyStore", "the binding's store of a URL, in builds with and without remote stores"),
    ("BlockCache", "the binding's class of the core's type"),
    ("RemoteStore", "the binding's class of the crate's type"),
    ("Rows", "the binding's class of the core's type"),
    ("Stream", "the binding's class of the core's type"),
];
/// Maximum lines of a file and of a function. A comment `Long: reason` above a function allows more.
const LONGEST_FILE: usize = 800;
const LONGEST_FUNCTION: usize = 80;

/// The declarations of a file, without its unit tests, associated types and macro output.
#[derive(Default)]
struct Declared {
    types: Vec<(String, usize)>,
    /// Each with its first line, counted from 1, and its number of lines.
    functions: Vec<(String, usize, usize)>,
    /// Types and traits that the file imports from other crates.
    foreign: BTreeSet<String>,
}

impl Declared {
    fn of(text: &str) -> Declared {
        let mut found = Declared::default();
        found.visit_file(&syn::parse_file(text).unwrap());
        found
    }

    fn name(&mut self, ident: &syn::Ident) {
        self.types.push((ident.to_string(), ident.span().start().line));
    }

    fn function(&mut self, signature: &syn::Signature, block: &syn::Block) {
        let (first, last) = (signature.fn_token.span.start().line, block.brace_token.span.close().end().line);
        self.functions.push((signature.ident.to_string(), first, last + 1 - first));
    }

    fn import(&mut self, tree: &syn::UseTree) {
        match tree {
            syn::UseTree::Path(path) => self.import(&path.tree),
            syn::UseTree::Group(group) => group.items.iter().for_each(|tree| self.import(tree)),
            syn::UseTree::Name(name) => {
                let name = name.ident.to_string();
                if name.starts_with(char::is_uppercase) && name.contains(char::is_lowercase) {
                    self.foreign.insert(name);
                }
            }
            syn::UseTree::Rename(_) | syn::UseTree::Glob(_) => {}
        }
    }
}

fn is_test(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        syn::Meta::List(list) if list.path.is_ident("cfg") => {
            let words = list.tokens.to_string();
            words.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "test") && !words.contains("not")
        }
        meta => meta.path().is_ident("test"),
    })
}

impl<'ast> Visit<'ast> for Declared {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        let (attributes, name) = match item {
            syn::Item::Struct(x) => (&x.attrs, Some(&x.ident)),
            syn::Item::Enum(x) => (&x.attrs, Some(&x.ident)),
            syn::Item::Union(x) => (&x.attrs, Some(&x.ident)),
            syn::Item::Trait(x) => (&x.attrs, Some(&x.ident)),
            syn::Item::Type(x) => (&x.attrs, Some(&x.ident)),
            syn::Item::Mod(x) => (&x.attrs, None),
            syn::Item::Fn(x) => (&x.attrs, None),
            syn::Item::Impl(x) => (&x.attrs, None),
            _ => return visit::visit_item(self, item),
        };
        if is_test(attributes) {
            return;
        }
        name.into_iter().for_each(|name| self.name(name));
        visit::visit_item(self, item);
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        if let (syn::UseTree::Path(path), syn::Visibility::Inherited) = (&item.tree, &item.vis)
            && !["crate", "self", "super", "actshard_core", "actshard_remote"].iter().any(|own| path.ident == own)
        {
            self.import(&path.tree);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.function(&item.sig, &item.block);
        visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.function(&item.sig, &item.block);
        visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        if let Some(block) = &item.default {
            self.function(&item.sig, block);
        }
        visit::visit_trait_item_fn(self, item);
    }
}

/// The comments and attributes directly above a line.
fn above(text: &str, line: usize) -> Vec<&str> {
    let lines: Vec<&str> = text.lines().take(line - 1).collect();
    let is_head = |line: &&str| line.trim_start().starts_with("//") || line.trim_start().starts_with("#[");
    lines.into_iter().rev().take_while(is_head).collect()
}

/// Functions of more than [`LONGEST_FUNCTION`] lines without a reason.
fn long(text: &str, declared: &Declared) -> Vec<String> {
    let long = declared.functions.iter().filter(|(.., lines)| *lines > LONGEST_FUNCTION);
    let unexplained = long.filter(|(_, first, _)| !above(text, *first).iter().any(|line| line.contains("Long: ")));
    unexplained.map(|(name, first, lines)| format!("{first}: {name}: {lines} lines")).collect()
}

fn code() -> Vec<(String, String)> {
    all(&["core/src", "remote/src", "py/src"])
}

/// The files below some folders, with their text.
fn all(folders: &[&str]) -> Vec<(String, String)> {
    let files = |folder: &&str| {
        let folder = (*folder).to_string();
        sources(&folder).into_iter().map(move |(path, text)| (format!("{folder}/{}", path.display()), text))
    };
    folders.iter().flat_map(files).collect()
}

#[test]
fn a_type_name_means_one_thing() {
    let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut foreign = BTreeSet::new();
    for (path, text) in code() {
        let declared = Declared::of(&text);
        foreign.extend(declared.foreign);
        for (name, line) in declared.types {
            places.entry(name).or_default().push(format!("{path}:{line}"));
        }
    }
    let reasoned = |name: &str| TWICE.iter().any(|(known, _)| *known == name);
    let twice: Vec<_> = places.iter().filter(|(name, at)| at.len() > 1 && !reasoned(name)).collect();
    assert!(twice.is_empty(), "{twice:#?}");
    let shadowed: Vec<_> = places.iter().filter(|(name, _)| foreign.contains(*name)).collect();
    assert!(shadowed.is_empty(), "another crate's types that are used here have these names: {shadowed:#?}");
    let freed: Vec<_> = TWICE.iter().filter(|(name, _)| places.get(*name).is_none_or(|at| at.len() < 2)).collect();
    assert!(freed.is_empty(), "take these off TWICE: {freed:?}");
}

#[test]
fn files_and_functions_are_short() {
    let mut found = vec![];
    for (path, text) in code() {
        let declared = Declared::of(&text);
        found.extend(long(&text, &declared).into_iter().map(|said| format!("{path}:{said}")));
    }
    for (path, text) in all(&["core", "remote", "py", "fuzz/src", "fuzz/tests", "fuzz/explore/src"]) {
        let lines = text.lines().count();
        if lines > LONGEST_FILE {
            found.push(format!("{path}: {lines} lines"));
        }
    }
    assert!(found.is_empty(), "{found:#?}");
}

const EXAMPLE: &str = r##"
//! struct InAComment;
use std::collections::{BTreeMap, HashMap as Table};
use std::{io::Read, ops::Range};
use super::Own;
pub struct One<'a>(&'a str);
mod inside {
    pub(super) enum Two { Variant }
    impl Iterator for Two {
        type Item = char;
        fn next(&mut self) -> Option<char> {
            struct Three;
            Some('"')
        }
    }
}
const TEXT: &str = r#"struct InAString { "#;
#[cfg(all(test, loom))]
mod tests { struct InATest; fn f() {} }
#[cfg(not(test))]
type Four = u8;
/* struct Outcommented; */
// Long: a reason.
#[inline]
fn long() {
    // struct { { {
}
"##;

#[test]
fn declarations_are_found_and_nothing_else() {
    let declared = Declared::of(EXAMPLE);
    let types: Vec<&str> = declared.types.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(types, ["One", "Two", "Three", "Four"]);
    let foreign: Vec<&str> = declared.foreign.iter().map(String::as_str).collect();
    assert_eq!(foreign, ["BTreeMap", "Range", "Read"]);
    assert_eq!(declared.functions, [("next".to_string(), 11, 4), ("long".to_string(), 25, 3)]);
}

#[test]
fn a_long_function_needs_a_reason() {
    let long_one = format!("fn f() {{{}}}", "\n".repeat(LONGEST_FUNCTION));
    let said = |text: &str| long(text, &Declared::of(text));
    assert_eq!(said(&long_one), [format!("1: f: {} lines", LONGEST_FUNCTION + 1)]);
    assert!(said(&format!("/// Does f.\n// Long: a reason.\n#[inline]\n{long_one}")).is_empty());
    assert!(!said(&format!("// Long: another's reason.\nfn g() {{}}\n{long_one}")).is_empty());
    assert!(said(&format!("fn f() {{{}}}", "\n".repeat(LONGEST_FUNCTION - 1))).is_empty());
}
