//! The known facts about a store's objects, in one place, without input or output. Every listing and every answer is
//! recorded here.
//!
//! A name is, for a store and its copies:
//! - *unknown*: a request is needed. It stays unknown after a 404 or a refusal.
//! - *an object*, from a listing or its first answer, with a size and a tag (strong, weak, only a time, or none). This
//!   is kept: later answers must agree, and later listings do not replace it. A tag without an ETag is completed by the
//!   first answer that has one.
//! - *newer*: an object that was first seen when the store was open, and was written after that ([`opening`]). This is
//!   kept, too.
//! - *a folder*: names below it were listed.
//! - *absent*: the folder that it would be in was listed without it, or is absent itself. An empty listing counts only if
//!   the store had a version before it ([`Known::has_version`]): what was absent earlier may be part of the version.
//!
//! Only [`Known::forget`] resets this, after objects were written.

mod opening;
mod packed;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use self::opening::Opening;
pub use self::packed::PackedKnown;
use crate::client::times::ServerDate;
use crate::client::{Answer, Expected, Listing, Tag};

/// The size and tag of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectFacts {
    /// Its size.
    pub size: u64,
    /// Its tag.
    pub tag: Tag,
}

impl ObjectFacts {
    /// The facts that answers must agree with.
    pub fn expected(&self) -> Expected {
        Expected { size: Some(self.size), tag: Some(self.tag.clone()).filter(|tag| !tag.is_empty()) }
    }

    /// Fails if another answer cannot be of the same version.
    fn agrees(&self, found: &ObjectFacts) -> Result<(), String> {
        if self.size != found.size {
            return Err(format!("it had {} bytes, now {}", self.size, found.size));
        }
        if self.tag.agrees(&found.tag) { Ok(()) } else { Err("its ETag has changed".to_string()) }
    }

    /// Takes over an ETag.
    fn complete(&mut self, found: &ObjectFacts) {
        if self.tag.etag.is_none() && found.tag.etag.is_some() || self.tag.is_empty() {
            self.tag = found.tag.clone();
        }
    }
}

impl Answer {
    /// The facts about its object.
    pub fn facts(&self) -> ObjectFacts {
        ObjectFacts { size: self.size, tag: self.tag.clone() }
    }
}

/// The known state of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KnownName {
    /// An object.
    Object(ObjectFacts),
    /// An object that was written after the store was opened.
    Newer,
    /// A folder.
    Folder,
    /// Nothing has this name.
    Absent,
    /// It was not listed.
    Unknown,
}

/// The message for objects that were written after the store was opened.
pub const NEWER: &str =
    "by the server's clock, it was written after the first file of the dataset was read; open the dataset again";

/// Names, each with its size if it is an object.
type Names<'a> = Box<dyn Iterator<Item = (&'a str, Option<u64>)> + 'a>;

/// Objects and folders that are known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Known {
    objects: BTreeMap<String, ObjectFacts>,
    /// Folders that were listed, each with the names directly inside that are folders.
    listed: BTreeMap<String, BTreeSet<String>>,
    /// Folders below which everything was listed.
    deep: BTreeSet<String>,
    /// Keys below which a listing found nothing. They may be objects.
    empty: BTreeSet<String>,
    /// Objects that were written after the first answer.
    newer: BTreeSet<String>,
    /// The first answer.
    opening: Option<Opening>,
    /// The server refused to list names. Not pickled: copies may have other credentials.
    unlistable: bool,
}

/// A key's folder and name.
fn split(key: &str) -> (&str, &str) {
    key.rsplit_once('/').unwrap_or(("", key))
}

fn is_inside(key: &str, folder: &str) -> bool {
    folder.is_empty() || key.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'))
}

impl Known {
    /// The known state of a key. What is absent has nothing below it.
    pub fn find(&self, key: &str) -> KnownName {
        let mut above = key;
        loop {
            match self.find_alone(above) {
                KnownName::Unknown => {}
                found if above == key || found == KnownName::Absent => return found,
                _ => return KnownName::Unknown,
            }
            above = split(above).0;
            if above.is_empty() {
                return KnownName::Unknown;
            }
        }
    }

    /// The known state of a key, from its own listings and those of its folder.
    fn find_alone(&self, key: &str) -> KnownName {
        if let Some(object) = self.objects.get(key) {
            return if self.newer.contains(key) { KnownName::Newer } else { KnownName::Object(object.clone()) };
        }
        if self.listed.contains_key(key) {
            let found = self.names(key).is_some_and(|mut names| names.next().is_some());
            return if found || key.is_empty() { KnownName::Folder } else { KnownName::Absent };
        }
        let (folder, name) = split(key);
        match self.listed.get(folder) {
            Some(folders) if folders.contains(name) => KnownName::Folder,
            Some(_) => KnownName::Absent,
            None if self.is_below_deep(key) || self.empty.contains(folder) => KnownName::Absent,
            None => KnownName::Unknown,
        }
    }

    /// Whether everything below a folder was listed.
    pub fn is_deep(&self, folder: &str) -> bool {
        self.is_below_deep(folder)
    }

    fn is_below_deep(&self, key: &str) -> bool {
        self.deep.iter().any(|folder| folder == key || is_inside(key, folder))
    }

    /// The names directly inside a folder, each with its size if it is an object; `None` if it was not listed.
    pub fn names<'a>(&'a self, folder: &'a str) -> Option<Names<'a>> {
        let Some(folders) = self.listed.get(folder) else {
            let nothing = self.is_below_deep(folder) || self.empty.contains(folder);
            return nothing.then(|| Box::new(std::iter::empty()) as Names<'a>);
        };
        let start = if folder.is_empty() { String::new() } else { format!("{folder}/") };
        let skip = start.len();
        let below = self.objects.range(start.clone()..).take_while(move |(key, _)| key.starts_with(&start));
        let direct = below.filter_map(move |(key, object)| {
            let name = &key[skip..];
            (!name.is_empty() && !name.contains('/')).then_some((name, Some(object.size)))
        });
        Some(Box::new(folders.iter().map(|name| (name.as_str(), None)).chain(direct)))
    }

    /// Records the first answer for an object. Fails, with a message for the user, if the object cannot belong to the
    /// store's version.
    pub fn first(&mut self, key: &str, found: &ObjectFacts, date: Option<ServerDate>) -> Result<(), String> {
        if let Some(known) = self.objects.get_mut(key) {
            // Two threads may open an object at once, and it may be replaced between their answers.
            known.agrees(found).map_err(|_| "two answers are of different versions".to_string())?;
            known.complete(found);
        } else {
            self.objects.insert(key.to_string(), found.clone());
            self.compare_time(key, &found.tag, date);
        }
        if self.newer.contains(key) { Err(NEWER.to_string()) } else { Ok(()) }
    }

    /// Marks an object as newer than the store, if it is. The first answer opens the store.
    fn compare_time(&mut self, key: &str, tag: &Tag, date: Option<ServerDate>) {
        match (self.opening, date) {
            (Some(opening), _) if opening.is_before(tag, date) => drop(self.newer.insert(key.to_string())),
            (None, Some(date)) => self.opening = Some(Opening::new(date, [tag])),
            _ => {}
        }
    }

    /// Records a further answer for an object that was opened with these facts. Fails, with a message for the user, if
    /// it is of another version.
    pub fn again(&mut self, key: &str, opened: &ObjectFacts, found: &ObjectFacts) -> Result<(), String> {
        opened.agrees(found)?;
        if let Some(known) = self.objects.get_mut(key) {
            known.agrees(found)?;
            known.complete(found);
        }
        Ok(())
    }

    /// The facts that the next answer must agree with, for an object that was opened with these facts.
    pub fn latest(&self, key: &str, opened: &ObjectFacts) -> ObjectFacts {
        self.objects.get(key).filter(|known| opened.agrees(known).is_ok()).unwrap_or(opened).clone()
    }

    /// Records that the server refuses to list names.
    pub fn refuse_listings(&mut self) {
        self.unlistable = true;
    }

    /// Whether names can be listed, as far as is known.
    pub fn lists(&self) -> bool {
        !self.unlistable
    }

    /// Forgets everything, because objects were written.
    pub fn forget(&mut self) {
        *self = Known::default();
    }

    /// The known object whose key shares the most folders with a key.
    pub fn nearest(&self, key: &str) -> Option<(String, ObjectFacts)> {
        let shared = |other: &str| key.bytes().zip(other.bytes()).take_while(|(a, b)| a == b).count();
        let is_older = |(other, _): &(&String, &ObjectFacts)| !self.newer.contains(*other);
        let before = self.objects.range::<str, _>((Bound::Unbounded, Bound::Excluded(key))).rfind(is_older);
        let after = self.objects.range::<str, _>((Bound::Included(key), Bound::Unbounded)).find(is_older);
        let nearest = before.into_iter().chain(after).max_by_key(|(other, _)| shared(other))?;
        Some((nearest.0.clone(), nearest.1.clone()))
    }

    /// Whether the server has shown an object or a folder. Its first such answer defines the version of the dataset.
    pub fn has_version(&self) -> bool {
        !(self.objects.is_empty() && self.listed.is_empty())
    }

    /// Records that nothing is below a key.
    pub fn record_empty(&mut self, key: &str) {
        self.empty.insert(key.to_string());
    }

    /// Records the content of a folder. Known objects keep their tags: a newer one must not pass unnoticed.
    pub fn record(&mut self, folder: &str, listing: Listing) {
        if let (None, Some(date)) = (self.opening, listing.date) {
            self.opening = Some(Opening::new(date, listing.objects.iter().map(|object| &object.tag)));
        }
        let mut folders = listing.folders;
        self.listed.entry(folder.to_string()).or_default();
        if listing.deep {
            self.deep.insert(folder.to_string());
            folders.extend(listing.objects.iter().filter_map(|object| {
                let (above, _) = split(&object.key);
                (above != folder && is_inside(above, folder)).then(|| above.to_string())
            }));
            folders.dedup();
        }
        // Known folders do not end the climb: another listing may have recorded a folder without those above it.
        let mut climbed = BTreeSet::new();
        for below in &folders {
            // Each folder on the way, for stores that list objects only.
            let mut at = below.as_str();
            while is_inside(at, folder) && !at.is_empty() && climbed.insert(at) {
                let (above, name) = split(at);
                self.listed.entry(above.to_string()).or_default().insert(name.to_string());
                if !listing.deep {
                    break;
                }
                self.listed.entry(at.to_string()).or_default();
                at = above;
            }
        }
        for object in listing.objects {
            // Empty objects that mark folders are left out.
            let (above, name) = split(&object.key);
            let marks = object.size == 0
                && (object.key == folder || self.listed.get(above).is_some_and(|folders| folders.contains(name)));
            if !marks && !self.objects.contains_key(&object.key) {
                self.compare_time(&object.key, &object.tag, listing.date);
                self.objects.insert(object.key, ObjectFacts { size: object.size, tag: object.tag });
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use crate::client::ListedObject;

    fn object(key: &str, size: u64) -> ListedObject {
        ListedObject { key: key.to_string(), size, tag: Tag::new(Some("e"), None) }
    }

    fn names(known: &Known, folder: &str) -> Option<Vec<(String, Option<u64>)>> {
        known.names(folder).map(|names| names.map(|(name, size)| (name.to_string(), size)).collect())
    }

    #[test]
    fn one_level_tells_nothing_of_the_next() {
        let mut known = Known::default();
        let objects = vec![object("run", 0), object("run/meta.json", 5)];
        known.record("run", Listing { objects, folders: vec!["run/layer".to_string()], ..Listing::default() });
        assert_eq!(names(&known, "run").unwrap(), [("layer".to_string(), None), ("meta.json".to_string(), Some(5))]);
        assert_eq!(known.find("run/layer"), KnownName::Folder);
        assert_eq!(known.find("run/other"), KnownName::Absent);
        assert_eq!(known.find("run/layer/0"), KnownName::Unknown);
        assert_eq!(known.find("run/other/0/x"), KnownName::Absent);
        assert_eq!(known.find("elsewhere"), KnownName::Unknown);
        assert!(names(&known, "run/layer").is_none());
    }

    #[test]
    fn a_deep_listing_tells_everything_below() {
        let mut known = Known::default();
        let objects = vec![object("run/a/b/c", 1), object("run/a/b", 0), object("run/x", 2)];
        known.record("run", Listing { objects, deep: true, ..Listing::default() });
        assert_eq!(names(&known, "run").unwrap(), [("a".to_string(), None), ("x".to_string(), Some(2))]);
        assert_eq!(names(&known, "run/a").unwrap(), [("b".to_string(), None)]);
        assert_eq!(names(&known, "run/a/b").unwrap(), [("c".to_string(), Some(1))]);
        assert_eq!(names(&known, "run/none").unwrap(), []);
        assert_eq!(known.find("run/a/b"), KnownName::Folder);
        assert_eq!(known.find("run/none/x"), KnownName::Absent);
        assert_eq!(known.find("other"), KnownName::Unknown);
    }

    #[test]
    fn a_deep_listing_tells_of_folders_whose_inside_was_listed_before() {
        let mut known = Known::default();
        known.record("run/a", Listing { folders: vec!["run/a/b".to_string()], ..Listing::default() });
        let objects = vec![object("run/a/b/c", 1), object("run/x", 2)];
        known.record("run", Listing { objects, deep: true, ..Listing::default() });
        assert_eq!(names(&known, "run").unwrap(), [("a".to_string(), None), ("x".to_string(), Some(2))]);
        assert_eq!(names(&known, "run/a").unwrap(), [("b".to_string(), None)]);
    }

    #[test]
    fn nothing_is_below_an_object() {
        let mut known = Known::default();
        known.record_empty("run/index");
        assert_eq!(known.find("run/index"), KnownName::Unknown);
        assert_eq!(known.find("run/index/a"), KnownName::Absent);
        assert_eq!(names(&known, "run/index").unwrap(), []);
    }

    #[test]
    fn the_depth_of_a_key_has_no_limit() {
        let mut known = Known::default();
        let deep = "a/".repeat(200_000);
        assert_eq!(known.find(&deep), KnownName::Unknown);
        known.record("", Listing::default());
        assert_eq!(known.find(&deep), KnownName::Absent);
    }

    #[test]
    fn packed_and_unpacked_it_is_the_same() {
        let mut known = Known::default();
        let objects = (0..1000).map(|i| object(&format!("run/é{i:05}.bin"), i)).collect();
        known.record("run", Listing { objects, folders: vec!["run/f".to_string()], ..Listing::default() });
        let text = serde_json::to_string(&known.pack()).unwrap();
        assert!(text.len() < 30 * 1000, "{}", text.len());
        assert_eq!(Known::unpack(serde_json::from_str(&text).unwrap()).unwrap(), known);
        let damaged = r#"{"objects": [[3, "x", 1, null, null]], "listed": {}, "deep": []}"#;
        assert!(Known::unpack(serde_json::from_str(damaged).unwrap()).is_none());
    }

    #[test]
    fn a_second_listing_does_not_hide_a_change() {
        let mut known = Known::default();
        known.record("", Listing { objects: vec![object("a", 1)], ..Listing::default() });
        known.record("", Listing { objects: vec![object("a", 2)], ..Listing::default() });
        assert!(matches!(known.find("a"), KnownName::Object(object) if object.size == 1));
    }
}
