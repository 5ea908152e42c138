//! Any bytes as a Parquet file: the parser rejects its footer in one line, or accepts one whose chunks are all inside the file; and
//! the pages of the first chunk follow each other up to its end.

use actshard_core::Kind;
use actshard_core::parse::parquet::{END, footer_begin, parse_footer, parse_pages};

use crate::memory::counted;

pub fn parquet_footer(bytes: &[u8]) {
    let size = bytes.len() as u64;
    let end = &bytes[bytes.len() - bytes.len().min(END as usize)..];
    let footer = counted(|| {
        let begin = footer_begin(end, size)?;
        parse_footer(&bytes[begin as usize..bytes.len() - END as usize], begin).map(|footer| (begin, footer))
    });
    let (begin, footer) = match footer {
        Ok(footer) => footer,
        Err(error) => {
            assert!(matches!(error.kind, Kind::Format | Kind::Truncated | Kind::Unsupported), "{error}");
            assert!(!error.to_string().contains(['\n', '\r']), "more than one line: {error:?}");
            assert!(error.offset.is_some_and(|at| at <= size), "{error:?}");
            return;
        }
    };
    assert_eq!(footer.groups.iter().map(|group| group.num_rows).sum::<u64>(), footer.num_rows);
    for group in &footer.groups {
        assert_eq!(group.columns.len(), footer.leaves.len());
        for chunk in &group.columns {
            let pages = chunk.pages();
            assert!(pages.is_empty() || (pages.start >= 4 && pages.end <= begin));
        }
    }
    let Some(chunk) = footer.groups.first().and_then(|group| group.columns.first()) else { return };
    let pages = if chunk.pages().is_empty() { 0..0 } else { chunk.pages() };
    let pages = &bytes[pages.start as usize..pages.end as usize];
    let found = counted(|| parse_pages(pages, size));
    let Ok(found) = found else { return };
    let mut last = 0;
    for page in &found {
        assert!(page.body > last);
        last = page.body + page.stored;
    }
    assert_eq!(last, pages.len() as u64);
}
