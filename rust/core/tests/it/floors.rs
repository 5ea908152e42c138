//! The floors of the core, the remote stores and the binding: no file uses a higher floor than its own, and no files use each
//! other in a circle.

use std::collections::{BTreeMap, BTreeSet};

use crate::sources::sources;

/// Lowest first. A module uses those before it; on one floor, modules are listed in the order in which they may use each other.
const CORE: &[&str] = &[
    "number",
    "location",
    "error",
    "kernels",
    "dtype",
    "threads",
    "memory",
    "source",
    "disk_cache",
    "codec",
    "arrays",
    "layout",
    "parse",
    "files",
    "gather",
    "rows",
    "scan",
    "stream",
    "write",
    "tokens",
    "lib",
];
const REMOTE: &[&str] = &[
    "runtime",
    "checks",
    "clock",
    "address",
    "options",
    "failure",
    "credentials",
    "client",
    "upload",
    "known",
    "offline",
    "state",
    "reading",
    "object",
    "store",
    "lib",
];
const BINDING: &[&str] = &[
    "errors",
    "detach",
    "remote",
    "remote_absent",
    "place",
    "copying",
    "buffer",
    "arguments",
    "decoding",
    "handle",
    "joined",
    "pickle",
    "containers",
    "parquet",
    "stream",
    "summing",
    "packing",
    "write",
    "tokens",
    "addresses",
    "chunk_arrays",
    "rows",
    "lib",
];

/// The files of a crate, and the files that each one uses.
struct Graph {
    files: Vec<String>,
    uses: BTreeMap<String, BTreeSet<String>>,
}

/// Source without comments and without its unit tests.
fn code(text: &str) -> String {
    let mut kept = String::new();
    for line in text.lines() {
        let line = if line.trim_start().starts_with("//") { "" } else { line };
        if line.starts_with("mod tests {") {
            break;
        }
        kept.push_str(line);
        kept.push('\n');
    }
    kept
}

/// Paths in a `use` tree, one by one.
fn leaves(tree: &str) -> Vec<String> {
    let Some((front, inside)) = tree.split_once('{') else { return vec![tree.trim().to_string()] };
    let inside = inside.trim_end().strip_suffix('}').unwrap_or(inside);
    let (mut depth, mut start, mut parts) = (0, 0, vec![]);
    for (at, c) in inside.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&inside[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&inside[start..]);
    let whole = |part: &str| leaves(&format!("{}{}", front.trim(), part.trim()));
    parts.into_iter().filter(|part| !part.trim().is_empty()).flat_map(whole).collect()
}

impl Graph {
    fn of(folder: &str) -> Graph {
        let mut texts: BTreeMap<String, String> = BTreeMap::new();
        for (path, text) in sources(folder) {
            let name = path.with_extension("").to_str().unwrap().replace('/', "::");
            let name = name.strip_suffix("::mod").unwrap_or(&name).to_string();
            texts.insert(name, code(&text));
        }
        let mut uses = BTreeMap::new();
        for (file, text) in &texts {
            let mut found: BTreeSet<String> =
                paths(file, text).iter().filter_map(|path| resolve(path, &texts)).collect();
            found.remove(file);
            uses.insert(file.clone(), found);
        }
        Graph { files: texts.into_keys().collect(), uses }
    }

    /// Every "a -> b" in which b is on a higher floor than a.
    fn upward(&self, floors: &[&str]) -> Vec<String> {
        let floor = |file: &str| {
            let room = file.split("::").next().unwrap();
            floors.iter().position(|f| *f == room).unwrap_or_else(|| panic!("{file} is on no floor"))
        };
        let arrows = self.uses.iter().flat_map(|(a, uses)| uses.iter().map(move |b| (a, b)));
        arrows.filter(|(a, b)| floor(b) > floor(a)).map(|(a, b)| format!("{a} -> {b}")).collect()
    }

    /// Groups of files in which every file uses all others, directly or indirectly.
    fn circles(&self) -> Vec<Vec<String>> {
        let reach = |from: &String| {
            let (mut seen, mut stack) = (BTreeSet::new(), vec![from]);
            while let Some(file) = stack.pop() {
                for next in &self.uses[file] {
                    if seen.insert(next) {
                        stack.push(next);
                    }
                }
            }
            seen
        };
        let reached: BTreeMap<&String, _> = self.files.iter().map(|f| (f, reach(f))).collect();
        let group = |f: &String| -> Vec<String> {
            reached[f].iter().filter(|other| reached[*other].contains(f)).map(|s| (*s).clone()).collect()
        };
        let groups: BTreeSet<Vec<String>> = self.files.iter().map(group).filter(|g| g.len() > 1).collect();
        groups.into_iter().collect()
    }
}

/// The paths of this crate that a file uses, absolute: those after `crate::` and `super::`, and those that begin with a child
/// module. Names that it only re-exports with `pub use` do not count.
fn paths(file: &str, text: &str) -> Vec<String> {
    let mut found = vec![];
    let absolute = |path: &str| -> Option<String> {
        if let Some(rest) = path.strip_prefix("crate::") {
            return Some(rest.to_string());
        }
        let (mut at, mut rest) = (file, path);
        while let Some(up) = rest.strip_prefix("super::") {
            (at, rest) = (at.rsplit_once("::").map_or("", |(parent, _)| parent), up);
        }
        (rest.len() < path.len()).then(|| if at.is_empty() { rest.to_string() } else { format!("{at}::{rest}") })
    };
    let children: Vec<&str> = text
        .lines()
        .filter_map(|line| line.trim().strip_suffix(';')?.rsplit_once("mod ").map(|(_, name)| name))
        .collect();
    let mut rest = String::new();
    for statement in text.split_inclusive(';') {
        let line = statement.find("use ").filter(|at| {
            let before = statement[..*at].trim_end();
            before.is_empty() || before.ends_with("pub") || before.ends_with(')') || before.ends_with(['}', ']', ';'])
        });
        let Some(at) = line else {
            rest.push_str(statement);
            continue;
        };
        rest.push_str(&statement[..at]);
        let handed_on = statement[..at].trim_end().ends_with("pub");
        for leaf in leaves(statement[at + 4..].trim_end_matches(';')) {
            let name = leaf.rsplit([':', ' ']).next().unwrap_or_default();
            if handed_on && text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|w| *w == name).count() < 2 {
                continue;
            }
            let leaf = leaf.replace("self::", "");
            let child = children.iter().any(|c| leaf.split("::").next() == Some(c));
            found.extend(if child { Some(format!("{file}::{leaf}")) } else { absolute(&leaf) });
        }
    }
    // Paths in the code itself.
    let word = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    for token in rest.split(|c: char| !word(c)).filter(|t| t.contains("::")) {
        let first = token.split("::").next().unwrap_or_default();
        if children.contains(&first) && file != "lib" {
            found.push(format!("{file}::{token}"));
        } else {
            found.extend(absolute(token));
        }
    }
    found
}

/// The file that defines a path, also through `pub use`.
fn resolve(path: &str, texts: &BTreeMap<String, String>) -> Option<String> {
    let parts: Vec<&str> = path.split("::").filter(|p| !p.is_empty()).collect();
    let (file, name) = (1..=parts.len()).rev().find_map(|n| {
        let file = parts[..n].join("::");
        texts.contains_key(&file).then(|| (file, parts.get(n).copied()))
    })?;
    let Some(name) = name else { return Some(file) };
    let handed = texts[&file].split(';').filter_map(|s| s.rsplit_once("pub use ").map(|(_, tree)| tree));
    for leaf in handed.flat_map(leaves) {
        if leaf.rsplit("::").next() == Some(name) {
            let inner =
                if leaf.starts_with("crate::") { leaf.replace("crate::", "") } else { format!("{file}::{leaf}") };
            return resolve(&inner, texts);
        }
    }
    Some(file)
}

fn check(folder: &str, floors: &[&str]) {
    let graph = Graph::of(folder);
    let (upward, circles) = (graph.upward(floors), graph.circles());
    assert!(upward.is_empty() && circles.is_empty(), "upward: {upward:#?}\ncircles: {circles:#?}");
}

#[test]
fn the_core_has_no_arrow_upward_and_no_circle() {
    check("core/src", CORE);
}

#[test]
fn the_remote_stores_have_no_arrow_upward_and_no_circle() {
    check("remote/src", REMOTE);
}

#[test]
fn the_binding_has_no_arrow_upward_and_no_circle() {
    check("py/src", BINDING);
}
