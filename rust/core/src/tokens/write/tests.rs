use std::sync::Arc;

use super::*;
use crate::source::Io;
use crate::source::local::Local;
use crate::tokens::array::BlockCache;
use crate::tokens::frame::Frame;
use crate::tokens::jagged::FieldShard;
use crate::tokens::ledger::LedgerState;
use proptest::prelude::*;

fn reopened(folder: &Path, io: Io) -> Field {
    let parts = vec![FieldShard { folder: folder.into(), counts: None }];
    Field::open(parts, Arc::new(Local { io }), Arc::new(BlockCache::new(1 << 20)), LedgerState::default()).unwrap()
}

fn crc_of(file: &Path) -> u32 {
    crc32fast::hash(&fs::read(file).unwrap())
}

const SMALL: WriteOptions = WriteOptions { storage: Storage::Plain, direct: false, inner: 64, per_file: 1 };

#[test]
fn a_writer_that_failed_once_makes_no_field() {
    for storage in [Storage::Plain, Storage::Lz4] {
        // Enough frames that waiting ones are compressed and written too.
        for (file, rows) in [("data/c/1", 600), ("offsets/c/1", 600), ("data/c/0", 600)] {
            let folder = tempfile::tempdir().unwrap();
            let mut writer =
                FieldWriter::create(folder.path(), DType::I32, 1, WriteOptions { storage, ..SMALL }).unwrap();
            let block = folder.path().join(file);
            fs::create_dir_all(&block).unwrap();
            let row: Vec<i32> = (0..64).collect();
            let mut append = |n: usize| (0..n).try_for_each(|_| writer.append(bytemuck::cast_slice(&row), &[64], &[]));
            assert!(append(rows).is_err(), "{file}");
            // There is space again, but the earlier rows are still incomplete.
            fs::remove_dir(&block).unwrap();
            assert!(append(1).unwrap_err().detail.contains("earlier write"));
            assert!(writer.finish().unwrap_err().detail.contains("earlier write"));
        }
    }
}

#[test]
fn a_writer_that_panicked_makes_no_field() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = FieldWriter::create(folder.path(), DType::I32, 1, SMALL).unwrap();
    let panic = |_: &mut FieldWriter| -> Result<()> { panic!("in the middle") };
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| writer.change(panic))).is_err());
    assert!(writer.append(&[0; 4], &[1], &[]).is_err() && writer.finish().is_err());
}

#[test]
fn a_refused_append_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = FieldWriter::create(folder.path(), DType::I32, 2, SMALL).unwrap();
    writer.append(&[1; 8], &[2], &[1]).unwrap();
    for (elements, lengths, shapes) in [(8usize, 1i64, 1usize), (8, 3, 1), (7, 1, 1), (8, -2, 1), (8, 2, 0), (8, 2, 2)]
    {
        assert!(writer.append(&vec![2; elements], &[lengths], &vec![1; shapes]).is_err());
    }
    writer.append(&[3; 12], &[3], &[1]).unwrap();
    let written = writer.finish().unwrap();
    assert_eq!((written.rows, written.elements), (2, 5));
    let names = ["data/c/0", "shapes/c/0/0", "offsets/c/0"];
    assert_eq!(written.checksums, names.map(|name| (name.into(), crc_of(&folder.path().join(name)))));
    let field = reopened(folder.path(), Io::Mmap);
    let mut out = vec![0u8; 20];
    field.copy(&mut Cursor::default(), 0, &mut out).unwrap();
    assert_eq!(out, [vec![1; 8], vec![3; 12]].concat());
    assert_eq!((field.shape(1).unwrap(), field.num_rows()), (vec![1], 2));
}

#[test]
fn fill_values_are_written_as_tensorstore_writes_them() {
    for (dtype, fill) in [(DType::F32, "\"fill_value\":0.0,"), (DType::I32, "\"fill_value\":0,")] {
        let folder = tempfile::tempdir().unwrap();
        FieldWriter::create(folder.path(), dtype, 1, SMALL).unwrap();
        let text = fs::read_to_string(folder.path().join("data/zarr.json")).unwrap();
        assert!(text.contains(fill), "{text}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    /// Small chunks simulate large caches: many frames, many files, an `offsets` of several files.
    #[test]
    fn any_rows_come_back_from_many_files(
        lengths in prop::collection::vec(0i64..70, 0..if cfg!(debug_assertions) { 300 } else { 700 }), per_append in 1usize..300, per_file in 1usize..4,
        plain: bool, direct: bool, mapped: bool,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let storage = if plain { Storage::Plain } else { Storage::Lz4 };
        let how = WriteOptions { storage, direct, inner: 64, per_file };
        let total: i64 = lengths.iter().sum();
        let elements: Vec<u32> = (0..total as u32).map(|i| i.wrapping_mul(2_654_435_761) >> 12).collect();
        let mut writer = FieldWriter::create(folder.path(), DType::U32, 1, how).unwrap();
        let mut at = 0;
        for some in lengths.chunks(per_append) {
            let n = some.iter().sum::<i64>() as usize;
            writer.append(bytemuck::cast_slice(&elements[at..at + n]), some, &[]).unwrap();
            at += n;
        }
        let written = writer.finish().unwrap();
        prop_assert_eq!((written.rows, written.elements), (lengths.len() as u64, total as u64));
        for (name, crc) in &written.checksums {
            prop_assert_eq!(*crc, crc_of(&folder.path().join(name)), "{}", name);
        }
        let files = ["data", "offsets"].map(|array| fs::read_dir(folder.path().join(array).join("c")).map_or(0, Iterator::count));
        prop_assert_eq!(written.checksums.len(), files.iter().sum::<usize>());

        let io = if mapped { Io::Mmap } else { Io::Pread };
        let field = reopened(folder.path(), io);
        prop_assert_eq!(field.num_rows(), lengths.len() as u64);
        let mut out = vec![0u8; elements.len() * 4];
        field.copy(&mut Cursor::default(), 0, &mut out).unwrap();
        prop_assert_eq!(&out[..], bytemuck::cast_slice::<u32, u8>(&elements));
        let bounds = field.bounds(&mut Cursor::default(), 0, lengths.len()).unwrap();
        let found: Vec<i64> = bounds.windows(2).map(|b| (b[1] - b[0]) as i64).collect();
        prop_assert_eq!(&found, &lengths);

        // Concatenated with itself: bytes are copied, rows follow rows.
        let twice = folder.path().join("twice");
        let mut writer = FieldWriter::create(&twice, DType::U32, 1, how).unwrap();
        writer.extend(&field, &mut || false).unwrap();
        writer.extend(&field, &mut || false).unwrap();
        writer.finish().unwrap();
        let both = reopened(&twice, io);
        let mut out = vec![0i32; elements.len() * 2];
        both.int32(&mut Cursor::default(), 0, &mut out).unwrap();
        let wanted: Vec<i32> = elements.iter().chain(&elements).map(|x| *x as i32).collect();
        prop_assert_eq!(out, wanted);
        prop_assert_eq!(both.num_rows(), 2 * lengths.len() as u64);
    }

    /// Compares our decoder of blocks with c-blosc's encoder.
    #[test]
    fn frames_of_c_blosc_decode(values in prop::collection::vec(any::<u32>(), 64..9000), wide: bool, narrow: bool) {
        let numbers: Vec<u64> = values.iter().map(|v| u64::from(if narrow { v >> 14 } else { *v })).collect();
        let bytes: Vec<u8> = match wide {
            true => bytemuck::cast_slice(&numbers).to_vec(),
            false => numbers.iter().flat_map(|n| (*n as u32).to_le_bytes()).collect(),
        };
        let item = if wide { 8 } else { 4 };
        let frame = &compressed(std::slice::from_ref(&bytes), item).unwrap()[0];
        let header = frame.first_chunk::<HEADER>().unwrap();
        let mut out = vec![];
        match Frame::parse(header, frame.len() as u64, bytes.len(), item).unwrap() {
            Frame::Stored => out.extend_from_slice(&frame[HEADER..]),
            Frame::Blocks(blocks) => for block in 0..blocks.count() {
                let planes = blocks.decode(frame, block, usize::MAX).unwrap();
                out.extend_from_slice(&planes.bytes(0, planes.numbers()));
            },
            Frame::Other => prop_assert!(false, "a frame of Levanter's settings is decoded here"),
        }
        prop_assert_eq!(out, bytes);
    }
}

#[test]
fn the_space_of_an_array_is_that_of_its_files() {
    for rows in [0, 1, 5, 40_000, INNER - 1, INNER, INNER + 7, 2 * INNER + 100_000] {
        let folder = tempfile::tempdir().unwrap();
        let how = WriteOptions::new(Storage::Plain, false);
        let mut writer = FieldWriter::create(folder.path(), DType::U16, 1, how).unwrap();
        writer.append(&vec![1; rows * 2], &vec![1; rows], &[]).unwrap();
        writer.finish().unwrap();
        let ends = if rows > 0 { rows + 1 } else { 0 };
        for (array, elements, item, offsets) in [("data", rows, 2, false), ("offsets", ends, 8, true)] {
            let size = plain_size(elements as u64, item, offsets).unwrap();
            let chunks = folder.path().join(array).join("c");
            let files: Vec<_> = fs::read_dir(chunks).map_or(vec![], |files| files.map(Result::unwrap).collect());
            let bytes: u64 = files.iter().map(|file| file.metadata().unwrap().len()).sum();
            assert_eq!((size.frames + size.indexes, size.files), (bytes, files.len() as u64), "{array} of {rows}");
            assert_eq!((elements as u64 + size.unused) % INNER as u64, 0);
        }
    }
    assert!(plain_size(u64::MAX, 8, false).is_err());
}
