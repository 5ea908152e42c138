//! Any bytes as a blosc frame: rejected in one line, or every block decodes to its numbers or fails, in full and in part, with equal
//! results as bytes and as int32. Frames that we write decode to their input.

use actshard_core::tokens::frame::{Frame, HEADER, short_frame};

use crate::memory::counted;

pub fn token_frame(data: &[u8]) {
    let Some((&[choice, blocks], frame)) = data.split_first_chunk::<2>() else { return };
    let item = 1usize << (choice % 4);
    let bytes = (usize::from(blocks) + 1) * 64 * item;
    check(frame, bytes, item);
    // Frames that we write can be read.
    let used = &frame[..frame.len() / item * item];
    if used.len() <= 1 << 16 {
        let whole = used.len().next_power_of_two().max(1 << 17);
        let ours = short_frame(used, whole, item);
        let header = ours.first_chunk::<HEADER>().expect("longer than a header");
        let mut out = vec![];
        match Frame::parse(header, ours.len() as u64, whole, item).expect("a valid frame") {
            Frame::Stored => out.extend_from_slice(&ours[HEADER..]),
            Frame::Blocks(blocks) => {
                for block in 0..blocks.count() {
                    let planes = counted(|| blocks.decode(&ours, block, usize::MAX)).expect("a valid block");
                    out.extend_from_slice(&planes.bytes(0, planes.numbers()));
                }
            }
            Frame::Other => panic!("our frame was not recognised"),
        }
        assert_eq!(&out[..used.len()], used);
        assert!(out[used.len()..].iter().all(|b| *b == 0) && out.len() == whole);
    }
}

fn check(frame: &[u8], bytes: usize, item: usize) {
    let Some(header) = frame.first_chunk::<HEADER>() else { return };
    let blocks = match counted(|| Frame::parse(header, frame.len() as u64, bytes, item)) {
        Ok(Frame::Blocks(blocks)) => blocks,
        Ok(_) => return,
        Err(detail) => {
            assert!(!detail.contains(['\n', '\r']));
            return;
        }
    };
    for block in 0..blocks.count() {
        let numbers = blocks.numbers(block);
        if let Some(begin) = blocks.stored(frame, block) {
            assert!(begin + numbers * item <= frame.len());
        }
        let Ok(whole) = counted(|| blocks.decode(frame, block, numbers)) else { continue };
        let all = whole.bytes(0, numbers).into_owned();
        assert_eq!(all.len(), numbers * item);
        // LZ4 does not guarantee equal numbers for the beginning of data from no encoder (matches of offset 0); for encoders'
        // data a property test of `codec::lz4` checks it.
        let part = counted(|| blocks.decode(frame, block, numbers / 2)).expect("a prefix of valid data");
        assert!(part.numbers() >= numbers / 2);
        assert_eq!(part.bytes(0, numbers / 2).len(), numbers / 2 * item);
        let mut narrow = vec![0i32; numbers];
        if whole.narrow(0, &mut narrow) {
            for (value, number) in narrow.iter().zip(all.chunks_exact(item)) {
                let mut wide = [0u8; 8];
                wide[..item].copy_from_slice(number);
                assert_eq!(i64::from(*value), i64::from_le_bytes(wide));
            }
        }
    }
}
