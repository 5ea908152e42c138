//! Compares how 4-D stores and token arrays read the same Zarr metadata, field by field.

use actshard_core::DType;
use actshard_core::arrays::element::{ElementType, Fill};
use actshard_core::arrays::meta::{ArrayMeta, Coding};
use actshard_core::error::Kind;
use actshard_core::tokens::meta::Meta;
use serde_json::{Value, json};

fn v3() -> Value {
    json!({"zarr_format": 3, "node_type": "array", "shape": [100], "data_type": "int32", "fill_value": 0,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [8]}},
        "chunk_key_encoding": {"name": "default"}, "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}]})
}

/// The metadata with the value at a JSON pointer replaced or removed.
fn with(mut meta: Value, at: &str, value: Option<Value>) -> Value {
    let (parent, name) = at.rsplit_once('/').unwrap();
    let parent = meta.pointer_mut(parent).unwrap().as_object_mut().unwrap();
    match value {
        Some(value) => parent.insert(name.to_string(), value),
        None => parent.remove(name),
    };
    meta
}

fn store(version: u8, meta: &Value) -> Result<ArrayMeta, Kind> {
    ArrayMeta::of_store(version, meta.to_string().as_bytes(), "").map_err(|e| e.kind)
}

fn tokens(meta: &Value) -> Result<Meta, Kind> {
    Meta::parse(meta.to_string().as_bytes()).map_err(|e| e.kind)
}

/// A field's JSON pointer, its value, and the error kinds of a 4-D store and of a token array.
type FieldCase = (&'static str, Option<Value>, Option<Kind>, Option<Kind>);

/// Each field that the two readers treat differently, or both reject; `None` if the metadata are accepted.
#[test]
fn each_reader_refuses_what_it_always_refused() {
    const FORMAT: Option<Kind> = Some(Kind::Format);
    const UNSUPPORTED: Option<Kind> = Some(Kind::Unsupported);
    let little = json!({"name": "bytes", "configuration": {"endian": "little"}});
    let cases: [FieldCase; 56] = [
        ("/zarr_format", Some(json!(3.0)), None, FORMAT),
        ("/zarr_format", Some(json!(2)), FORMAT, FORMAT),
        ("/zarr_format", None, FORMAT, FORMAT),
        ("/node_type", None, None, FORMAT),
        ("/node_type", Some(json!("group")), None, FORMAT),
        ("/shape", Some(json!([])), FORMAT, FORMAT),
        ("/shape", Some(json!([1u64 << 54])), FORMAT, None),
        ("/shape", Some(json!([1u64 << 61])), FORMAT, FORMAT),
        ("/shape", Some(json!([-1])), FORMAT, FORMAT),
        ("/shape", Some(json!([8.0])), FORMAT, FORMAT),
        ("/shape", Some(json!([true])), FORMAT, FORMAT),
        ("/chunk_grid", None, FORMAT, FORMAT),
        ("/chunk_grid/name", Some(json!("rectangular")), UNSUPPORTED, FORMAT),
        ("/chunk_grid/configuration/chunk_shape", Some(json!([0])), FORMAT, FORMAT),
        ("/chunk_grid/configuration/chunk_shape", Some(json!([8, 8])), FORMAT, FORMAT),
        ("/chunk_key_encoding", None, None, FORMAT),
        ("/chunk_key_encoding", Some(json!({})), None, FORMAT),
        ("/chunk_key_encoding", Some(json!(null)), FORMAT, FORMAT),
        ("/chunk_key_encoding/name", Some(json!("suffix")), FORMAT, FORMAT),
        ("/chunk_key_encoding/configuration", Some(json!({"separator": "-"})), FORMAT, FORMAT),
        ("/chunk_key_encoding/configuration", Some(json!({"separator": 5})), FORMAT, None),
        ("/chunk_key_encoding/configuration", Some(json!([])), None, None),
        ("/chunk_key_encoding/configuration", Some(json!(5)), FORMAT, None),
        ("/data_type", Some(json!("bool")), FORMAT, FORMAT), // because of the fill value; see below
        ("/data_type", Some(json!("complex64")), None, FORMAT),
        ("/data_type", Some(json!("string")), None, FORMAT),
        ("/data_type", Some(json!("float8_e5m2")), None, None),
        ("/data_type", Some(json!("float8_e3m4")), UNSUPPORTED, FORMAT),
        ("/data_type", Some(json!({"name": "numpy.datetime64"})), UNSUPPORTED, FORMAT),
        ("/data_type", Some(json!([["a", "<f2"]])), UNSUPPORTED, FORMAT),
        ("/codecs", None, FORMAT, None),
        ("/codecs", Some(json!([])), FORMAT, None),
        ("/codecs", Some(json!(["bytes"])), FORMAT, None),
        ("/codecs", Some(json!([little, "crc32c"])), FORMAT, None),
        ("/codecs", Some(json!([{"name": "bytes", "configuration": {"endian": "middle"}}])), FORMAT, None),
        ("/codecs", Some(json!([{"name": "bytes", "configuration": 5}])), FORMAT, None),
        ("/codecs", Some(json!([{"name": "bytes", "configuration": null}])), None, None),
        ("/codecs", Some(json!([{"name": "bytes", "configuration": {"endian": "big"}}])), None, None),
        ("/codecs", Some(json!([{"name": "sharding_indexed"}])), FORMAT, FORMAT),
        ("/codecs", Some(sharding(json!({}))), None, None),
        ("/codecs", Some(sharding(json!({"chunk_shape": [3]}))), FORMAT, FORMAT),
        ("/codecs", Some(sharding(json!({"chunk_shape": [0]}))), FORMAT, FORMAT),
        ("/codecs", Some(sharding(json!({"index_location": "middle"}))), None, FORMAT),
        ("/codecs", Some(sharding(json!({"index_codecs": [little, {"name": "gzip"}]}))), None, FORMAT),
        ("/codecs", Some(sharding(json!({"index_codecs": null}))), None, FORMAT),
        ("/fill_value", None, None, FORMAT),
        ("/fill_value", Some(json!(null)), None, FORMAT),
        ("/fill_value", Some(json!(false)), FORMAT, None),
        ("/fill_value", Some(json!(true)), FORMAT, FORMAT),
        ("/fill_value", Some(json!(-0.0)), None, None),
        ("/fill_value", Some(json!(1.0)), None, FORMAT),
        ("/fill_value", Some(json!(1.5)), FORMAT, FORMAT),
        ("/fill_value", Some(json!(1u64 << 31)), FORMAT, FORMAT),
        ("/fill_value", Some(json!("0x000000ff")), None, FORMAT),
        ("/fill_value", Some(json!("NaN")), FORMAT, FORMAT),
        ("/fill_value", Some(json!({})), FORMAT, FORMAT),
    ];
    for (at, value, four, one) in cases {
        let meta = with(v3(), at, value);
        assert_eq!(store(3, &meta).err(), four, "4-D stores: {at}: {meta}");
        assert_eq!(tokens(&meta).err(), one, "token arrays: {at}: {meta}");
    }
}

/// The sharding codec, with some fields replaced.
fn sharding(changes: Value) -> Value {
    let little = json!({"name": "bytes", "configuration": {"endian": "little"}});
    let mut configuration =
        json!({"chunk_shape": [4], "codecs": [little.clone()], "index_codecs": [little, {"name": "crc32c"}]});
    for (name, value) in changes.as_object().unwrap() {
        configuration[name] = value.clone();
    }
    json!([{"name": "sharding_indexed", "configuration": configuration}])
}

type FillCase = (&'static str, &'static str, Option<Fill>, Option<Vec<u8>>);

/// Fill values: type, value, the 4-D store's result, and the token array's bytes.
#[test]
fn fill_values() {
    let float = |x: f64| Some(Fill::Float(x));
    let bits = |x: &[u8]| Some(Fill::Bits(x.to_vec()));
    let cases: Vec<FillCase> = vec![
        ("int64", "9007199254740993", Some(Fill::Integer(9_007_199_254_740_993)), Some(le(9_007_199_254_740_993i64))),
        ("int64", "-9223372036854775808", Some(Fill::Integer(i64::MIN.into())), Some(le(i64::MIN))),
        // The JSON parser rounds it to a float, equal to -2^63.
        ("int64", "-9223372036854775809", None, None),
        ("int64", "9223372036854775808", None, None),
        ("uint64", "18446744073709551615", Some(Fill::Integer(u64::MAX.into())), Some(vec![0xff; 8])),
        ("uint64", "18446744073709551616", None, None),
        ("uint64", "1e19", float(1e19), None),
        ("uint8", "\"0xff\"", bits(&[0xff]), None),
        ("uint8", "256", None, None),
        ("int8", "-0.0", float(-0.0), Some(vec![0])),
        ("float32", "-0.0", float(-0.0), Some(vec![0, 0, 0, 0x80])),
        ("float32", "-0", float(-0.0), Some(vec![0, 0, 0, 0x80])),
        ("float32", "\"0x7fc00123\"", bits(&[0x23, 1, 0xc0, 0x7f]), Some(vec![0x23, 1, 0xc0, 0x7f])),
        ("float32", "\"0x7F800001\"", bits(&[1, 0, 0x80, 0x7f]), Some(vec![1, 0, 0x80, 0x7f])),
        ("float32", "\"0x1\"", None, Some(vec![1, 0, 0, 0])),
        ("float32", "\"0x100000000\"", None, None),
        ("float32", "\"0x\"", None, None),
        ("float32", "\"NaN\"", float(f64::NAN), Some(vec![0, 0, 0xc0, 0x7f])),
        ("float32", "\"-Infinity\"", float(f64::NEG_INFINITY), Some(vec![0, 0, 0x80, 0xff])),
        ("float32", "\"nan\"", None, None),
        ("float32", "1e39", float(1e39), Some(vec![0, 0, 0x80, 0x7f])),
        ("float32", "1e300", None, Some(vec![0, 0, 0x80, 0x7f])),
        ("float32", "true", None, None),
        ("float64", "0.1", float(0.1), Some(0.1f64.to_le_bytes().to_vec())),
        ("float64", "1000000000000000000000000000000", float(1e30), Some(1e30f64.to_le_bytes().to_vec())),
        (
            "float64",
            "\"0x7ff8000000000abc\"",
            bits(&[0xbc, 0x0a, 0, 0, 0, 0, 0xf8, 0x7f]),
            Some(vec![0xbc, 0x0a, 0, 0, 0, 0, 0xf8, 0x7f]),
        ),
        ("float16", "\"0x7e01\"", bits(&[1, 0x7e]), Some(vec![1, 0x7e])),
        ("float16", "1.5", float(1.5), Some(vec![0, 0x3e])),
        ("bfloat16", "1", float(1.0), Some(vec![0x80, 0x3f])),
        ("bool", "true", Some(Fill::Bool(true)), None),
        ("bool", "0", None, None),
        ("bool", "null", Some(Fill::Absent), None),
        ("complex64", "1.5", float(1.5), None),
        ("complex64", "[1.0, 2.0]", None, None),
        ("string", "5", Some(Fill::Text(String::new())), None),
        ("string", "\"\"", Some(Fill::Text(String::new())), None),
    ];
    for (name, value, four, one) in cases {
        let text = with(with(v3(), "/data_type", Some(json!(name))), "/fill_value", Some(json!("HERE"))).to_string();
        let text = text.replace("\"HERE\"", value);
        let found = ArrayMeta::of_store(3, text.as_bytes(), "").ok().map(|meta| meta.fill);
        // Equal in all bits, including NaN values.
        assert_eq!(format!("{found:?}"), format!("{four:?}"), "4-D stores: {name} {value}");
        let found = Meta::parse(text.as_bytes()).ok().map(|meta| meta.fill[..meta.item()].to_vec());
        assert_eq!(found, one, "token arrays: {name} {value}");
    }
}

fn le(n: i64) -> Vec<u8> {
    n.to_le_bytes().to_vec()
}

#[test]
fn metadata_of_version_2() {
    let meta = json!({"zarr_format": 2, "shape": [4, 6], "chunks": [2, 3], "dtype": ">f4", "compressor": null,
        "filters": null, "order": "C", "fill_value": null, "dimension_separator": "/"});
    let plain = store(2, &meta).unwrap();
    assert_eq!((&plain.shape[..], &plain.outer[..], &plain.inner[..]), (&[4, 6][..], &[2, 3][..], &[2, 3][..]));
    assert_eq!((plain.element, plain.swapped, plain.fill), (ElementType::Number(DType::F32), true, Fill::Absent));
    assert_eq!(
        (plain.coding, plain.how.as_str(), plain.naming.file(&[1, 1])),
        (Coding::Foreign, "", "1/1".to_string())
    );
    let coded = with(with(meta.clone(), "/compressor", Some(json!({"id": "gzip"}))), "/order", Some(json!("F")));
    let coded = with(coded, "/filters", Some(json!([{"id": "delta"}])));
    let found = store(2, &coded).unwrap();
    assert_eq!(
        (found.how.as_str(), found.codecs),
        ("gzip, delta, F order", vec!["gzip".to_string(), "delta".to_string()])
    );
    let types = [
        ("<f2", Some(("float16", false))),
        ("|b1", Some(("bool", false))),
        (">u1", Some(("uint8", false))),
        (">i8", Some(("int64", true))),
        ("bfloat16", Some(("bfloat16", false))),
        ("<c16", Some(("c16", false))),
        (">S5", Some(("S5", false))),
        (">U3", Some(("U3", true))),
        ("<i04", Some(("int32", false))),
        ("<f3", None),
        ("<M8", None),
        ("<f1", Some(("float8_e5m2", false))),
        ("f4", Some(("float32", false))),
        ("<S1000000", None),
    ];
    for (code, expected) in types {
        let found = store(2, &with(meta.clone(), "/dtype", Some(json!(code))));
        let found = found.ok().map(|meta| (meta.element.numpy().unwrap(), meta.swapped));
        assert_eq!(found, expected.map(|(name, swapped)| (name.to_string(), swapped)), "{code}");
    }
    assert_eq!(store(2, &with(meta.clone(), "/dtype", Some(json!("|O")))).unwrap().element, ElementType::Strings);
    for (at, value, kind) in [
        ("/dtype", json!([["a", "<f2"]]), Kind::Unsupported),
        ("/dtype", json!(null), Kind::Format),
        ("/zarr_format", json!(3), Kind::Format),
        ("/chunks", json!([2]), Kind::Format),
        ("/chunks", json!([0, 1]), Kind::Format),
        ("/order", json!(null), Kind::Format),
        ("/dimension_separator", json!("-"), Kind::Format),
        ("/compressor", json!("zstd"), Kind::Format),
        ("/compressor", json!({"level": 1}), Kind::Format),
        ("/filters", json!({"id": "delta"}), Kind::Format),
        ("/filters", json!([5]), Kind::Format),
        ("/fill_value", json!("one"), Kind::Format),
    ] {
        assert_eq!(store(2, &with(meta.clone(), at, Some(value))).unwrap_err(), kind, "{at}");
    }
    for optional in ["/zarr_format", "/order", "/dimension_separator", "/compressor", "/filters", "/fill_value"] {
        assert!(store(2, &with(meta.clone(), optional, None)).is_ok(), "{optional}");
    }
}

#[test]
fn errors_name_the_field_and_where_it_is() {
    let meta = with(v3(), "/codecs", Some(sharding(json!({"chunk_shape": [3]}))));
    let said = ArrayMeta::of_store(3, meta.to_string().as_bytes(), "").unwrap_err().to_string();
    assert_eq!(
        said,
        "field 'codecs[0].configuration.chunk_shape': expected a divisor of the shard's shape [8], found [3]"
    );
    let said = ArrayMeta::of_store(2, b"{\"shape\": 5}", "a/.zarray").unwrap_err().to_string();
    assert_eq!(said, "field 'a/.zarray.shape': expected a list of integers of at least 0, found 5");
    let long = with(v3(), "/data_type", Some(json!("é".repeat(50))));
    let said = ArrayMeta::of_store(3, long.to_string().as_bytes(), "").unwrap_err().to_string();
    assert!(said.len() < 120 && said.ends_with("..."), "{said}");
}
