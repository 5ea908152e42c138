//! Any bytes: the pickle machine rejects them in one line, or accepts consistent values: each array has the bytes that its shape
//! needs, before and after `materialise`. The output of a small pickler for the same bytes is read back equal.

use actshard_core::parse::pickle::shard::layers;
use actshard_core::parse::pickle::{Node, Tree, machine};

use crate::memory::counted;

/// Plain values made from bytes: their pickle in protocol 4, and the expected result of reading it.
fn write(bytes: &mut impl Iterator<Item = u8>, depth: usize, out: &mut Vec<u8>, description: &mut String) -> Option<()> {
    match bytes.next()? % if depth < 4 { 8 } else { 5 } {
        0 => {
            out.push(b'N');
            description.push('N');
        }
        1 => {
            let b = bytes.next()?;
            out.extend([b'K', b]);
            description.push_str(&format!("i{b}"));
        }
        2 => {
            let n = i32::from_le_bytes([bytes.next()?, bytes.next()?, bytes.next()?, bytes.next()?]);
            out.push(b'J');
            out.extend(n.to_le_bytes());
            description.push_str(&format!("i{n}"));
        }
        3 => {
            let text: String = (0..bytes.next()? % 8).filter_map(|_| bytes.next()).map(char::from).collect();
            out.extend([0x8c, text.len() as u8]);
            out.extend(text.as_bytes());
            description.push_str(&format!("s{text}"));
        }
        4 => {
            let data: Vec<u8> = (0..bytes.next()? % 8).filter_map(|_| bytes.next()).collect();
            out.extend([b'C', data.len() as u8]);
            out.extend(&data);
            description.push_str(&format!("b{data:?}"));
        }
        5 => {
            out.extend(b"](");
            description.push('[');
            for _ in 0..bytes.next()? % 4 {
                write(bytes, depth + 1, out, description)?;
            }
            out.push(b'e');
            description.push(']');
        }
        6 => {
            out.push(b'(');
            description.push('(');
            for _ in 0..bytes.next()? % 4 {
                write(bytes, depth + 1, out, description)?;
            }
            out.push(b't');
            description.push(')');
        }
        _ => {
            out.extend(b"}(");
            description.push('{');
            for i in 0..bytes.next()? % 4 {
                out.extend([b'K', i]);
                description.push_str(&format!("i{i}:"));
                write(bytes, depth + 1, out, description)?;
            }
            out.push(b'u');
            description.push('}');
        }
    }
    Some(())
}

fn read(tree: &Tree, input: &[u8], id: u32, description: &mut String) {
    match tree.node(id) {
        Node::None => description.push('N'),
        Node::Int(n) => description.push_str(&format!("i{n}")),
        Node::Str(blob) => description.push_str(&format!("s{}", String::from_utf8_lossy(tree.bytes(input, blob)))),
        Node::Bytes(blob) => description.push_str(&format!("b{:?}", tree.bytes(input, blob))),
        Node::List(items) => {
            description.push('[');
            items.iter().for_each(|id| read(tree, input, *id, description));
            description.push(']');
        }
        Node::Tuple(items) => {
            description.push('(');
            items.iter().for_each(|id| read(tree, input, *id, description));
            description.push(')');
        }
        Node::Dict(pairs) => {
            description.push('{');
            for (key, value) in pairs {
                read(tree, input, *key, description);
                description.push(':');
                read(tree, input, *value, description);
            }
            description.push('}');
        }
        other => description.push_str(&format!("{other:?}")),
    }
}

pub fn pickle(bytes: &[u8]) {
    let (mut pickle, mut want) = (vec![0x80, 4], String::new());
    if write(&mut bytes.iter().copied(), 0, &mut pickle, &mut want).is_some() {
        pickle.push(b'.');
        let tree = machine::parse(&pickle).expect("a pickler's output");
        let mut text = String::new();
        read(&tree, &pickle, tree.root(), &mut text);
        assert_eq!(text, want);
    }

    let parsed = counted(|| machine::parse(bytes));
    let least = counted(|| machine::least(bytes));
    let tree = match parsed {
        Ok(tree) => tree,
        Err(error) => {
            // Bytes after the end are an error of the whole file only.
            let whole = counted(|| machine::parse_as(bytes, machine::Dialect::Plain)).is_ok();
            assert_eq!(least.is_ok(), whole || error.kind == actshard_core::Kind::Truncated, "{error:?}");
            assert!(error.offset.is_some_and(|offset| offset <= bytes.len() as u64), "{error:?}");
            assert!(!error.to_string().contains(['\n', '\r']), "more than one line: {error:?}");
            return;
        }
    };
    let Ok(index) = counted(|| layers(&tree, bytes, None)) else { return };
    let mut copies = 0;
    for item in index.lists.iter().flatten() {
        // Many arrays can share one buffer.
        copies += item.array.data.len();
        if copies > 16 << 20 {
            return;
        }
        let size = item.array.element.dtype.size().expect("a float") as u64;
        let expected = item.array.shape.iter().product::<u64>() * size;
        assert_eq!(item.array.data.len(), expected);
        // Not counted: many arrays of one buffer are larger than the input, and a reader has one of them at a time.
        let mut out = vec![];
        tree.materialise(bytes, item.array, &mut out).expect("an array that was checked");
        assert_eq!(out.len() as u64, expected);
        if let Some(range) = item.array.in_place() {
            assert_eq!(bytes[range], out[..]);
        }
    }
}
