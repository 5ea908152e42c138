//! Any bytes as a block of packed rows: decoding equals that of a simple decoder of docs/formats/planes.md, which reads one bit after the
//! other, rows decoded apart are those of the whole block, and decoded rows that are packed again decode to the same rows.

use std::collections::BTreeSet;

use actshard_core::Kind;
use actshard_core::codec::planes::{HEADER, PackedBlock, decode, encode, encoded_len};

use crate::memory::counted;

/// The bytes at the beginning of `rest`, which are taken.
fn take<'a>(rest: &mut &'a [u8], n: usize) -> Option<&'a [u8]> {
    let (taken, after) = rest.split_at_checked(n)?;
    *rest = after;
    Some(taken)
}

fn word(bytes: &[u8]) -> usize {
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize
}

/// A coded plane of `n` symbols; `None` if it is damaged.
fn coded(rest: &mut &[u8], n: usize) -> Option<Vec<u8>> {
    let begin = take(rest, 2)?;
    let (first, count) = (usize::from(begin[0]), usize::from(begin[1]) + 1);
    let halves: Vec<u8> = take(rest, count.div_ceil(2))?.iter().flat_map(|both| [both & 15, both >> 4]).collect();
    let (lengths, spare) = halves.split_at(count);
    if first + count > 256 || spare.iter().any(|half| *half > 0) || lengths[0] == 0 || lengths[count - 1] == 0 {
        return None;
    }
    let mut symbols: Vec<(u8, usize)> =
        lengths.iter().zip(first..).filter(|(length, _)| **length > 0).map(|(length, symbol)| (*length, symbol)).collect();
    symbols.sort_unstable();
    // Codes as text: the next one is the last one plus one, filled up with zeros to its length.
    let (mut codes, mut code, mut before) = (vec![], 0u32, 0);
    for (length, symbol) in symbols {
        code <<= length - before;
        before = length;
        codes.push((length, code, u8::try_from(symbol).unwrap()));
        code += 1;
    }
    if before > 11 || code != 1 << before {
        return None;
    }
    let sizes: Vec<usize> = take(rest, 16)?.chunks(4).map(word).collect();
    let mut plane = vec![];
    for (size, k) in sizes.into_iter().zip(1..) {
        let stream = take(rest, size)?;
        let mut bits = stream.iter().flat_map(|byte| (0..8).rev().map(move |bit| u32::from(byte >> bit & 1)));
        while plane.len() < (k * n.div_ceil(4)).min(n) {
            let (mut length, mut code) = (0, 0);
            plane.push(loop {
                code = code << 1 | bits.next()?;
                length += 1;
                if let Some((_, _, symbol)) = codes.iter().find(|(l, c, _)| (*l, *c) == (length, code)) {
                    break *symbol;
                }
            });
        }
        let padding: Vec<u32> = bits.collect();
        if padding.len() > 7 || padding.contains(&1) {
            return None;
        }
    }
    Some(plane)
}

/// The rows of a block; `None` if it is damaged or longer than `most`.
fn plainly(block: &[u8], most: usize) -> Option<Vec<u8>> {
    let mut rest = block;
    let head = take(&mut rest, 24)?;
    let [encoded, decoded, row, stored] = [4, 8, 12, 16].map(|at| word(&head[at..]));
    let [typesize, way, kind, sign] = [20, 21, 22, 23].map(|at| usize::from(head[at]));
    let is_sound = head.starts_with(b"APL1")
        && encoded == block.len()
        && decoded <= most
        && [1, 2, 4, 8].contains(&typesize)
        && row > 0
        && row % typesize == 0
        && decoded % row == 0
        && stored <= decoded / row
        && sign <= [0, 8 * typesize - 1][way.min(1)];
    if !is_sound {
        return None;
    }
    let missing = decoded / row - stored;
    let mut index = vec![];
    if kind == 3 {
        let width = if stored > 256 { 2 } else { 1 };
        let numbers = take(&mut rest, decoded / row * width)?.chunks(width);
        index.extend(numbers.map(|number| number.iter().rev().fold(0, |sum, byte| sum << 8 | usize::from(*byte))));
        // The numbers of first occurrences are all numbers in their order.
        let mut seen = BTreeSet::new();
        let is_first = |number: &usize| seen.insert(*number);
        if !index.iter().copied().filter(is_first).eq(0..stored) || stored > 1 << 16 {
            return None;
        }
    }
    let mut rows = match way {
        0 => take(&mut rest, stored * row)?.to_vec(),
        1 => {
            let n = stored * row / typesize;
            let mut values = vec![0u64; n];
            for k in 0..if n == 0 { 0 } else { typesize } {
                let plane = match take(&mut rest, 1)?[0] {
                    0 => take(&mut rest, n)?.to_vec(),
                    1 => vec![take(&mut rest, 1)?[0]; n],
                    2 => coded(&mut rest, n)?,
                    _ => return None,
                };
                values.iter_mut().zip(plane).for_each(|(value, byte)| *value |= u64::from(byte) << (8 * k));
            }
            let top = 8 * typesize - 1;
            let plain = values.into_iter().flat_map(|value| {
                let bit = value >> sign & 1;
                let rotated = value & !(1 << sign) | bit;
                ((rotated >> 1) | (rotated & 1) << top).to_le_bytes().into_iter().take(typesize)
            });
            plain.collect()
        }
        _ => return None,
    };
    let last = rows.len().checked_sub(row).map(|at| rows[at..].to_vec());
    match (kind, missing) {
        (0, 0) => {}
        (1, 1..) => rows.resize(decoded, 0),
        (2, 1..) => rows.extend(last?.repeat(missing)),
        (3, 1..) => rows = index.into_iter().flat_map(|number| &rows[number * row..(number + 1) * row]).copied().collect(),
        _ => return None,
    }
    (rest.is_empty()).then_some(rows)
}

const MOST: usize = 1 << 18;

/// Decodes some rows apart. Of a damaged block they are an error or anything.
fn apart(data: &[u8], rows: Option<&[u8]>) {
    let Ok(block) = PackedBlock::parse(data, MOST as u64) else { return assert!(rows.is_none()) };
    let (row, count) = (block.row(), (block.decoded() / block.row()) as u64);
    if row > MOST {
        return;
    }
    let mut made = vec![0; row];
    let last = count.saturating_sub(1);
    for numbers in [vec![0], vec![last], vec![last / 3, last / 2, last / 2], vec![count]] {
        let done = block.rows(&numbers, &mut |i, found| {
            found.write(&mut made);
            if let Some(rows) = rows {
                let begin = usize::try_from(numbers[i]).unwrap() * row;
                assert_eq!(made, rows[begin..begin + row]);
            }
        });
        assert!(done.is_ok() || rows.is_none() || numbers.iter().any(|number| *number >= count));
    }
}

pub fn planes(data: &[u8]) {
    let rows = plainly(data, MOST);
    apart(data, rows.as_deref());
    match (counted(|| decode(data, MOST as u64)), rows) {
        (Ok(decoded), Some(rows)) => {
            assert_eq!(decoded, rows);
            assert_eq!(encoded_len(data).unwrap(), data.len() as u64);
            let (typesize, row) = (usize::from(data[20]), word(&data[12..]));
            let again = encode(&rows, typesize, row / typesize).unwrap();
            assert!(again.len() <= HEADER + rows.len(), "longer than the rows");
            assert_eq!(decode(&again, MOST as u64).unwrap(), rows);
        }
        (Err(error), None) => assert_eq!(error.kind, Kind::Format, "{error}"),
        (decoded, rows) => panic!("decoded {:?}, plainly {:?}", decoded.map(|d| d.len()), rows.map(|rows| rows.len())),
    }
}
