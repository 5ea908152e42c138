//! [`Known`] in a pickled store.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::opening::Opening;
use super::{Known, ObjectFacts};
use crate::client::Tag;

/// Bytes shared with the key before, the rest of the key, size, ETag and time.
type PackedObject = (usize, String, u64, Option<Box<str>>, Option<Box<str>>);

/// [`Known`] in a pickled store.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct PackedKnown {
    objects: Vec<PackedObject>,
    listed: BTreeMap<String, BTreeSet<String>>,
    deep: BTreeSet<String>,
    #[serde(default)]
    empty: BTreeSet<String>,
    #[serde(default)]
    newer: BTreeSet<String>,
    #[serde(default)]
    opening: Option<Opening>,
}

impl Known {
    /// A form for pickles: each key omits the beginning that it shares with the previous key.
    pub fn pack(&self) -> PackedKnown {
        let mut before = "";
        let mut objects = Vec::with_capacity(self.objects.len());
        for (key, object) in &self.objects {
            let same = before.char_indices().zip(key.chars()).take_while(|((_, a), b)| a == b);
            let shared = same.last().map_or(0, |((at, c), _)| at + c.len_utf8());
            let strong = object.tag.if_match().is_some();
            let modified = object.tag.modified.clone().filter(|_| !strong);
            objects.push((shared, key[shared..].to_string(), object.size, object.tag.etag.clone(), modified));
            before = key;
        }
        let (listed, deep, empty) = (self.listed.clone(), self.deep.clone(), self.empty.clone());
        PackedKnown { objects, listed, deep, empty, newer: self.newer.clone(), opening: self.opening }
    }

    /// The content of a packed form; `None` if it is damaged.
    pub fn unpack(packed: PackedKnown) -> Option<Known> {
        let (mut before, mut objects) = (String::new(), BTreeMap::new());
        for (shared, rest, size, etag, modified) in packed.objects {
            let key = format!("{}{rest}", before.get(..shared)?);
            objects.insert(key.clone(), ObjectFacts { size, tag: Tag { etag, modified } });
            before = key;
        }
        let PackedKnown { listed, deep, empty, newer, opening, .. } = packed;
        Some(Known { objects, listed, deep, empty, newer, opening, unlistable: false })
    }
}
