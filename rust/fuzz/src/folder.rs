//! Folders for the targets whose parsers read files.

use std::path::Path;

use tempfile::TempDir;

/// An empty folder that goes away with the value, in memory where the system has a folder there.
pub fn scratch() -> TempDir {
    let memory = Path::new("/dev/shm");
    let folder = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    folder.expect("a folder to write to")
}
