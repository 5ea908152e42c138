//! Decoding errors below the level of files: a text and a kind.

use crate::error::{Error, Finding, Kind};

/// Why a step of decoding failed; the caller adds the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Undecodable {
    /// [`Kind::Format`], or [`Kind::NoMemory`], which is not a fault of the bytes.
    pub kind: Kind,
    /// What is wrong.
    pub text: String,
    /// The finding, if there is one.
    pub finding: Option<Finding>,
}

impl<T: Into<String>> From<T> for Undecodable {
    fn from(text: T) -> Undecodable {
        Undecodable { kind: Kind::Format, text: text.into(), finding: None }
    }
}

impl From<Error> for Undecodable {
    fn from(error: Error) -> Undecodable {
        Undecodable { kind: error.kind, text: error.detail, finding: error.finding }
    }
}

pub(super) type Said<T> = Result<T, Undecodable>;
