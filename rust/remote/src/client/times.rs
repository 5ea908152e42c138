//! Times of servers, in seconds since 1970.

use std::time::UNIX_EPOCH;

use reqwest::header::HeaderMap;

use crate::credentials::aws::time_of;

/// The header `Date` of an answer: when the server made it. Travels with answers through object_store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerDate(pub u64);

impl ServerDate {
    /// The date of an answer, if it has one.
    pub fn of(headers: &HeaderMap) -> Option<ServerDate> {
        headers.get("date")?.to_str().ok().and_then(seconds_of).map(ServerDate)
    }
}

/// Seconds of a header, `Sun, 06 Nov 1994 08:49:37 GMT`, or of a number.
pub fn seconds_of(text: &str) -> Option<u64> {
    const MONTHS: &str = "JanFebMarAprMayJunJulAugSepOctNovDec";
    if let Ok(seconds) = text.parse() {
        return Some(seconds);
    }
    let mut words = text.split_once(", ")?.1.split(' ');
    let (day, month, year, time) = (words.next()?, words.next()?, words.next()?, words.next()?);
    let month = MONTHS.find(month).filter(|at| at.is_multiple_of(3) && month.len() == 3)? / 3 + 1;
    let time = time_of(&format!("{year}-{month:02}-{day:0>2}T{time}Z"))?;
    Some(time.duration_since(UNIX_EPOCH).ok()?.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_headers_or_numbers() {
        assert_eq!(seconds_of("Sun, 06 Nov 1994 08:49:37 GMT"), Some(784_111_777));
        assert_eq!(seconds_of("784111777"), Some(784_111_777));
        assert_eq!((seconds_of("soon"), seconds_of("Sun, 06 anF 1994 08:49:37 GMT")), (None, None));
    }
}
