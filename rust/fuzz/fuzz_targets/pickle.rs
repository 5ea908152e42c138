//! Any bytes: the pickle machine rejects them in one line, or accepts consistent values: each array has the bytes that its shape
//! needs, before and after `materialise`. The output of a small pickler for the same bytes is read back equal.
#![no_main]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use actshard_core::parse::pickle::shard::layers;
use actshard_core::parse::pickle::{Node, Tree, machine};
use libfuzzer_sys::fuzz_target;

/// Counts allocated memory, which the size of a pickle must bound.
struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is the system allocator's own, with the caller's arguments.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(now, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The peak of memory that `work` allocates.
fn peak<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = NOW.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let done = work();
    (done, PEAK.load(Ordering::Relaxed).saturating_sub(before))
}

/// Plain values made from bytes: their pickle in protocol 4, and the expected result of reading it.
fn write(bytes: &mut impl Iterator<Item = u8>, depth: usize, out: &mut Vec<u8>, said: &mut String) -> Option<()> {
    match bytes.next()? % if depth < 4 { 8 } else { 5 } {
        0 => {
            out.push(b'N');
            said.push('N');
        }
        1 => {
            let b = bytes.next()?;
            out.extend([b'K', b]);
            said.push_str(&format!("i{b}"));
        }
        2 => {
            let n = i32::from_le_bytes([bytes.next()?, bytes.next()?, bytes.next()?, bytes.next()?]);
            out.push(b'J');
            out.extend(n.to_le_bytes());
            said.push_str(&format!("i{n}"));
        }
        3 => {
            let text: String = (0..bytes.next()? % 8).filter_map(|_| bytes.next()).map(char::from).collect();
            out.extend([0x8c, text.len() as u8]);
            out.extend(text.as_bytes());
            said.push_str(&format!("s{text}"));
        }
        4 => {
            let data: Vec<u8> = (0..bytes.next()? % 8).filter_map(|_| bytes.next()).collect();
            out.extend([b'C', data.len() as u8]);
            out.extend(&data);
            said.push_str(&format!("b{data:?}"));
        }
        5 => {
            out.extend(b"](");
            said.push('[');
            for _ in 0..bytes.next()? % 4 {
                write(bytes, depth + 1, out, said)?;
            }
            out.push(b'e');
            said.push(']');
        }
        6 => {
            out.push(b'(');
            said.push('(');
            for _ in 0..bytes.next()? % 4 {
                write(bytes, depth + 1, out, said)?;
            }
            out.push(b't');
            said.push(')');
        }
        _ => {
            out.extend(b"}(");
            said.push('{');
            for i in 0..bytes.next()? % 4 {
                out.extend([b'K', i]);
                said.push_str(&format!("i{i}:"));
                write(bytes, depth + 1, out, said)?;
            }
            out.push(b'u');
            said.push('}');
        }
    }
    Some(())
}

fn read(tree: &Tree, input: &[u8], id: u32, said: &mut String) {
    match tree.node(id) {
        Node::None => said.push('N'),
        Node::Int(n) => said.push_str(&format!("i{n}")),
        Node::Str(blob) => said.push_str(&format!("s{}", String::from_utf8_lossy(tree.bytes(input, blob)))),
        Node::Bytes(blob) => said.push_str(&format!("b{:?}", tree.bytes(input, blob))),
        Node::List(items) => {
            said.push('[');
            items.iter().for_each(|id| read(tree, input, *id, said));
            said.push(']');
        }
        Node::Tuple(items) => {
            said.push('(');
            items.iter().for_each(|id| read(tree, input, *id, said));
            said.push(')');
        }
        Node::Dict(pairs) => {
            said.push('{');
            for (key, value) in pairs {
                read(tree, input, *key, said);
                said.push(':');
                read(tree, input, *value, said);
            }
            said.push('}');
        }
        other => said.push_str(&format!("{other:?}")),
    }
}

fuzz_target!(|bytes: &[u8]| {
    let (mut pickle, mut want) = (vec![0x80, 4], String::new());
    if write(&mut bytes.iter().copied(), 0, &mut pickle, &mut want).is_some() {
        pickle.push(b'.');
        let tree = machine::parse(&pickle).expect("a pickler's output");
        let mut got = String::new();
        read(&tree, &pickle, tree.root(), &mut got);
        assert_eq!(got, want);
    }

    let (parsed, taken) = peak(|| machine::parse(bytes));
    assert!(taken < (96 << 20) + 16 * bytes.len(), "{taken} bytes for a pickle of {}", bytes.len());
    let least = machine::least(bytes);
    let tree = match parsed {
        Ok(tree) => tree,
        Err(error) => {
            assert_eq!(least.is_ok(), error.kind == actshard_core::Kind::Truncated, "{error:?}");
            assert!(error.offset.is_some_and(|at| at <= bytes.len() as u64), "{error:?}");
            assert!(!error.to_string().contains(['\n', '\r']), "more than one line: {error:?}");
            return;
        }
    };
    let (found, taken) = peak(|| layers(&tree, bytes, None));
    assert!(taken < (32 << 20) + 16 * bytes.len(), "{taken} bytes for an index of {}", bytes.len());
    let Ok(found) = found else { return };
    let mut copies = 0;
    for item in found.lists.iter().flatten() {
        // Many arrays can share one buffer.
        copies += item.array.data.len();
        if copies > 16 << 20 {
            return;
        }
        let size = item.array.element.dtype.size().expect("a float") as u64;
        let expected = item.array.shape.iter().product::<u64>() * size;
        assert_eq!(item.array.data.len(), expected);
        let mut out = vec![];
        tree.materialise(bytes, &item.array, &mut out).expect("an array that was checked");
        assert_eq!(out.len() as u64, expected);
        if let Some(range) = item.array.in_place() {
            assert_eq!(bytes[range], out[..]);
        }
    }
});
