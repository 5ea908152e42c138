//! Fields of JSON metadata, with types and sizes checked.

use serde_json::Value;

use crate::error::{Error, Finding, Kind, Result};

/// Limits on the accepted metadata.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Upper limit of sizes, exclusive.
    pub size: u64,
    /// Maximum number of dimensions.
    pub dimensions: usize,
    /// Whether to tolerate values that the specification does not allow: separators and configurations of a wrong type
    /// count as the default, invalid codecs give [`Coding::Foreign`](super::meta::Coding), `false` is zero, and fill values may have any
    /// magnitude.
    pub lenient: bool,
}

impl Limits {
    /// The limits of 4-D stores and their small arrays.
    pub const STORE: Limits = Limits { size: 1 << 48, dimensions: 8, lenient: false };
}

/// Parses JSON.
pub fn parse(text: &[u8]) -> Result<Value> {
    serde_json::from_slice(text).map_err(|e| Error::new(Kind::Format, format!("expected JSON: {e}")))
}

/// A JSON object, and its path in the metadata for errors.
#[derive(Clone, Debug)]
pub struct Fields<'a> {
    fields: &'a serde_json::Map<String, Value>,
    place: String,
}

impl<'a> Fields<'a> {
    /// Checks that a value is an object. An empty `place` is the whole text.
    pub fn of(value: Option<&'a Value>, place: String) -> Result<Fields<'a>> {
        if let Some(Value::Object(fields)) = value {
            return Ok(Fields { fields, place });
        }
        let field = if place.is_empty() { String::new() } else { format!("field '{place}': ") };
        let detail = format!("{field}expected an object, found {}", shown(value.unwrap_or(&Value::Null)));
        Err(Error::new(Kind::Format, detail).finds(Finding::Metadata))
    }

    /// A field.
    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.fields.get(name)
    }

    /// The full path of a field.
    pub(super) fn place(&self, name: &str) -> String {
        if self.place.is_empty() { name.to_string() } else { format!("{}.{name}", self.place) }
    }

    pub(super) fn object(&self, name: &str) -> Result<Fields<'a>> {
        Fields::of(self.get(name), self.place(name))
    }

    /// The error for an invalid field.
    pub fn wrong(&self, name: &str, expected: &str) -> Error {
        let found = self.get(name).map_or_else(|| "nothing".to_string(), shown);
        Error::new(Kind::Format, format!("field '{}': expected {expected}, found {found}", self.place(name)))
            .finds(Finding::Metadata)
    }

    pub(super) fn unsupported(&self, name: &str, why: &str) -> Error {
        let found = shown(self.get(name).unwrap_or(&Value::Null));
        Error::new(Kind::Unsupported, format!("field '{}': {why} {found}", self.place(name)))
    }

    pub(super) fn is_version(&self, name: &str, version: f64, optional: bool) -> Result<()> {
        match self.get(name) {
            None if optional => Ok(()),
            Some(found) if found.as_f64() == Some(version) => Ok(()),
            _ => Err(self.wrong(name, &version.to_string())),
        }
    }

    /// A list of sizes, of length `dimensions` if that is given.
    pub(super) fn sizes(&self, name: &str, least: u64, dimensions: Option<usize>, limits: &Limits) -> Result<Vec<u64>> {
        let size = |value: &Value| value.as_u64().filter(|n| (least..limits.size).contains(n));
        let found = self.get(name).and_then(Value::as_array).and_then(|list| list.iter().map(size).collect());
        let found: Vec<u64> =
            found.ok_or_else(|| self.wrong(name, &format!("a list of integers of at least {least}")))?;
        if let Some(n) = dimensions.filter(|n| *n != found.len()) {
            return Err(self.wrong(name, &format!("{n} integers, one per dimension of the shape")));
        }
        if found.len() > limits.dimensions {
            return Err(self.wrong(name, &format!("at most {} dimensions", limits.dimensions)));
        }
        Ok(found)
    }
}

/// A value as JSON, shortened for a message.
fn shown(value: &Value) -> String {
    let mut text = value.to_string();
    if text.len() > 60 {
        let end = (0..=57).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(end);
        text.push_str("...");
    }
    text
}
