//! Any bytes as a file of torch.save, a zip archive of arrays, or a .npy file: rejected in one line, or accepted with arrays that lie
//! in the file and can be read.

use actshard_core::Error;
use actshard_core::location::Location;
use actshard_core::parse::arrays::{self, ArrayPlace};
use actshard_core::parse::pickle::Node;
use actshard_core::parse::{npy, torch};
use actshard_core::source::Source;
use actshard_core::source::held::Held;
use actshard_core::threads::{Context, Stop};

use crate::memory::counted;

fn refused(error: &Error) {
    assert!(!error.to_string().contains(['\n', '\r']), "more than one line: {error:?}");
}

/// An accepted array lies in its file, and reading it returns all elements unless their number is far beyond the file's.
fn check(source: &dyn Source, place: &ArrayPlace) {
    let extent = place.extent().expect("an extent that fits 64 bits");
    let size = place.inside.map_or(source.size(), |region| region.size);
    assert!(extent == 0 || place.at + extent <= size);
    // Not counted: many arrays of one storage are larger than the file, and a reader has one of them at a time.
    match arrays::read(source, place, &mut Context::of_part(&Stop::new())) {
        Ok(bytes) => assert_eq!(Some(bytes.len() as u64), place.count().map(|n| n * place.item())),
        Err(error) => refused(&error),
    }
}

pub fn containers(bytes: &[u8]) {
    let source = Held::new(Location::object("fuzz", "file"), bytes.to_vec().into());
    match counted(|| torch::read(&source, 1 << 20, &mut Context::of_part(&Stop::new()))) {
        Ok(file) => {
            let inner: &dyn Source = file.held.as_ref().map_or(&source, |held| held);
            for node in file.tree.nodes() {
                match node {
                    Node::Tensor(tensor) => check(inner, &file.place(tensor).expect("a checked tensor has a place")),
                    Node::Array(array) => file.array_place(array).iter().for_each(|place| check(inner, place)),
                    _ => {}
                }
            }
            let (stored, used) = file.sizes();
            assert!(used <= stored);
            if let Err(error) = counted(|| file.damaged(inner, &mut Context::of_part(&Stop::new()))) {
                refused(&error);
            }
        }
        Err(error) => refused(&error),
    }
    match counted(|| npy::read(&source, &Stop::new())) {
        Ok(array) => check(&source, &array.place),
        Err(error) => refused(&error),
    }
    match counted(|| npy::read_archive(&source, &mut Context::of_part(&Stop::new()))) {
        Ok(members) => members.iter().for_each(|(_, array)| check(&source, &array.place)),
        Err(error) => refused(&error),
    }
}
