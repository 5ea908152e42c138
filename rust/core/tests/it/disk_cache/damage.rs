//! Damage behind the cache's back.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::far::{Dice, files};

/// Damages a random file of a cache folder: overwrites, truncates, extends or removes it. Faults are ignored: others change the
/// folder meanwhile.
pub fn damage(root: &Path, dice: &mut Dice) {
    let all = files(root);
    let Some(path) = all.get(dice.below(all.len() as u64) as usize) else { return };
    let Ok(file) = OpenOptions::new().read(true).write(true).open(path) else { return };
    let len = file.metadata().map_or(0, |meta| meta.len());
    // The names that matter are those of locks: without them two processes would count apart, which costs space only.
    let removable = path.ends_with("data") || path.ends_with("state") || path.ends_with("url");
    let _ = match dice.below(10) {
        0 => file.set_len(dice.below(len + 1)),
        1 if removable => std::fs::remove_file(path),
        2 => file.write_all_at(&vec![0; dice.below(70_000) as usize], dice.below(len + 1)),
        3 => file.set_len(len + dice.below(9000)),
        _ => {
            // Near the start there are heads, and bytes that were stored.
            let at = if dice.below(2) == 0 { dice.below(200) } else { dice.below(len + 1) };
            let bytes: Vec<u8> = (0..=dice.below(300)).map(|_| dice.next() as u8).collect();
            file.write_all_at(&bytes, at)
        }
    };
}
