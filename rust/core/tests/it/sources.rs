//! Shared by the tests of the source code itself.

use std::path::{Path, PathBuf};

/// The Rust files below a folder of `rust/`, each with its path in that folder and its text.
pub fn sources(folder: &str) -> Vec<(PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join(folder);
    let (mut found, mut folders) = (vec![], vec![root.clone()]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                found.push((path.strip_prefix(&root).unwrap().to_path_buf(), text));
            }
        }
    }
    found.sort();
    found
}
