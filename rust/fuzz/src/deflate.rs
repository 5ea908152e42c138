//! Any bytes: inflating a gzip file gives the same result as another decoder (zlib-rs), or both fail. Values inflated from the
//! middle of deflate data, without the preceding window, equal the data.

use std::io::{Read, Write};

use actshard_core::codec::inflate::{self, blocks};
use actshard_core::threads::{Context, Stop};

use crate::memory::counted;

const LIMIT: u64 = 4 << 20;

/// All members, as Python reads them: zeros may follow the last one.
fn another(gz: &[u8]) -> Option<Vec<u8>> {
    let (mut rest, mut data) = (gz, vec![]);
    while !rest.is_empty() {
        if rest.len() < gz.len() && rest.iter().all(|b| *b == 0) {
            break;
        }
        let mut one = flate2::bufread::GzDecoder::new(rest);
        (&mut one).take(LIMIT + 1).read_to_end(&mut data).ok()?;
        if data.len() as u64 > LIMIT {
            return None;
        }
        rest = one.into_inner();
    }
    (!gz.is_empty()).then_some(data)
}

/// libdeflate and zlib differ on headers that no encoder writes: reserved flags, a wrong header checksum.
fn usual_headers(gz: &[u8]) -> bool {
    gz.len() > 3 && gz[3] & 0xe2 == 0
}

fn same(gz: &[u8]) {
    let ours = counted(|| inflate::inflate(gz, LIMIT, &mut Context::of_part(&Stop::new())));
    if let Err(error) = &ours {
        assert!(!error.to_string().contains(['\n', '\r']), "{error:?}");
    }
    if let (Some(theirs), true) = (another(gz), usual_headers(gz)) {
        if let Ok(ours) = &ours {
            assert!(ours[..] == theirs[..]);
        }
    } else if let Ok(ours) = ours {
        // If only libdeflate accepts the input, the checksum has verified it.
        assert!(ours.len() as u64 <= LIMIT);
    }
    assert!(counted(|| inflate::front(gz, 1000)).len() <= 1000);
}

pub fn deflate(bytes: &[u8]) {
    same(bytes);
    let Some((&level, data)) = bytes.split_first() else { return };
    let mut encoder = flate2::GzBuilder::new().write(vec![], flate2::Compression::new(u32::from(level % 10)));
    encoder.write_all(data).expect("a vector");
    let gz = encoder.finish().expect("a vector");
    let ours = counted(|| inflate::inflate(&gz, LIMIT, &mut Context::of_part(&Stop::new()))).expect("an encoder's output");
    assert!(ours[..] == *data);
    // The body begins after the ten-byte header. A block found there is real, and its values equal the data.
    let body = &gz[10..gz.len() - 8];
    for deflated in [body, bytes] {
        let warm = counted(|| blocks::warm_up(deflated, 0, deflated.len() as u64 * 8, 128 << 10, 1 << 20));
        let Some(warm) = warm else { continue };
        assert!(warm.begin < warm.end && warm.end <= deflated.len() as u64 * 8);
        assert!(warm.values.len() <= (128 << 10) + (64 << 10) + 258);
        let window = &warm.values[warm.values.len() - blocks::WINDOW..];
        assert!(window.iter().all(|v| *v < blocks::MARK), "the last window has marks");
        if std::ptr::eq(deflated, body) && warm.begin == 0 {
            assert!(warm.values.iter().zip(data).all(|(v, b)| *v == u16::from(*b)), "values differ from the data");
        }
    }
}
