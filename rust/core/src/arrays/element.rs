//! Element types and fill values of Zarr arrays.
//!
//! Source: the Zarr core specification 3.0, "Data types" and "Fill value".

use serde_json::Value;

use crate::dtype::DType;

/// Limit on the magnitude of fill values that are floats.
const MOST_FILL: f64 = 1e300;

/// The type of an array's elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ElementType {
    /// A number with a [`DType`].
    Number(DType),
    /// A number without a [`DType`], by its numpy name.
    Wide(&'static str),
    /// Bytes (`S`) or characters (`U`) of fixed length.
    Text(char, u32),
    /// Strings or bytes of variable length.
    Strings,
}

/// The element of missing chunks, as given in the metadata; of the element type.
#[derive(Clone, Debug, PartialEq)]
pub enum Fill {
    /// No value: zero, as in zarr-python.
    Absent,
    /// A boolean.
    Bool(bool),
    /// An integer.
    Integer(i128),
    /// A number with a decimal point or exponent, or NaN or infinity; for integer types without a fraction.
    Float(f64),
    /// The element's bytes, little-endian.
    Bits(Vec<u8>),
    /// A text; an empty one for elements of a fixed size.
    Text(String),
}

impl ElementType {
    /// The numpy or ml_dtypes name; `None` for strings of variable length.
    pub fn numpy(&self) -> Option<String> {
        match self {
            ElementType::Number(dtype) => dtype.numpy_name().map(str::to_string),
            ElementType::Wide(name) => Some((*name).to_string()),
            ElementType::Text(unit, n) => Some(format!("{unit}{n}")),
            ElementType::Strings => None,
        }
    }

    /// Bytes per number.
    pub(super) fn size(&self) -> Option<usize> {
        match self {
            ElementType::Number(dtype) => dtype.size(),
            _ => None,
        }
    }

    /// The smallest and largest number, for integers.
    fn range(&self) -> Option<(i128, i128)> {
        let ElementType::Number(dtype) = self else { return None };
        Some(match dtype {
            DType::I8 => (i8::MIN.into(), i8::MAX.into()),
            DType::I16 => (i16::MIN.into(), i16::MAX.into()),
            DType::I32 => (i32::MIN.into(), i32::MAX.into()),
            DType::I64 => (i64::MIN.into(), i64::MAX.into()),
            DType::U8 => (0, u8::MAX.into()),
            DType::U16 => (0, u16::MAX.into()),
            DType::U32 => (0, u32::MAX.into()),
            DType::U64 => (0, u64::MAX.into()),
            _ => return None,
        })
    }
}

impl Fill {
    /// Parses the fill value of an element type; `None` if the value is invalid.
    pub fn of(element: &ElementType, value: Option<&Value>, lenient: bool) -> Option<Fill> {
        let value = match (element, value) {
            (ElementType::Text(..), _) => return Some(Fill::Text(String::new())),
            (ElementType::Strings, _) => {
                return Some(Fill::Text(value.and_then(Value::as_str).unwrap_or_default().to_string()));
            }
            (_, None | Some(Value::Null)) => return Some(Fill::Absent),
            (_, Some(value)) => value,
        };
        if let Value::String(text) = value
            && text.starts_with("0x")
        {
            return bits(text, element.size()?, lenient).map(Fill::Bits);
        }
        if let Some((least, most)) = element.range() {
            let whole = |n: &i128| (least..=most).contains(n);
            return match value {
                Value::Bool(false) if lenient => Some(Fill::Integer(0)),
                Value::Number(n) if n.is_f64() => {
                    // -2^63 as a float may be a rounded smaller integer.
                    let n = n.as_f64().filter(|n| n.fract() == 0.0 && *n > i64::MIN as f64)?;
                    #[expect(
                        clippy::cast_possible_truncation,
                        reason = "numbers beyond 2^127 become its bounds, which are no elements"
                    )]
                    let integer = n as i128;
                    whole(&integer).then_some(Fill::Float(n))
                }
                Value::Number(n) => integer(n).filter(whole).map(Fill::Integer),
                _ => None,
            };
        }
        if *element == ElementType::Number(DType::Bool) {
            return value.as_bool().map(Fill::Bool);
        }
        match value {
            Value::Bool(false) if lenient => Some(Fill::Integer(0)),
            Value::Number(n) => n.as_f64().filter(|n| lenient || n.abs() < MOST_FILL).map(Fill::Float),
            Value::String(text) => match text.as_str() {
                "NaN" => Some(Fill::Float(f64::NAN)),
                "Infinity" => Some(Fill::Float(f64::INFINITY)),
                "-Infinity" => Some(Fill::Float(f64::NEG_INFINITY)),
                _ => None,
            },
            _ => None,
        }
    }

    /// The element's bytes, little-endian; `None` if it is not a number of this type. Only the first [`DType::size`] bytes
    /// are used.
    pub fn bytes(&self, dtype: DType) -> Option<[u8; 8]> {
        let size = dtype.size()?;
        let mut made = [0; 8];
        let mut put = |bytes: &[u8]| made.get_mut(..bytes.len()).map(|to| to.copy_from_slice(bytes));
        match (self, ElementType::Number(dtype).range()) {
            (Fill::Absent, _) => Some(()),
            (Fill::Bits(bytes), _) => put(bytes),
            (Fill::Integer(n), Some(_)) => put(n.to_le_bytes().get(..size)?),
            #[expect(clippy::cast_possible_truncation, reason = "a whole number in the type's range")]
            (Fill::Float(n), Some(_)) => put((*n as i128).to_le_bytes().get(..size)?),
            (Fill::Integer(n), None) => float_bytes(*n as f64, dtype, put),
            (Fill::Float(n), None) => float_bytes(*n, dtype, put),
            (Fill::Bool(_) | Fill::Text(_), _) => None,
        }?;
        Some(made)
    }
}

fn float_bytes(n: f64, dtype: DType, mut put: impl FnMut(&[u8]) -> Option<()>) -> Option<()> {
    match dtype {
        DType::F64 => put(&n.to_le_bytes()),
        #[expect(clippy::cast_possible_truncation, reason = "rounds")]
        DType::F32 => put(&(n as f32).to_le_bytes()),
        DType::F16 => put(&half::f16::from_f64(n).to_le_bytes()),
        DType::BF16 => put(&half::bf16::from_f64(n).to_le_bytes()),
        _ => put(&[float8(n, dtype)?]),
    }
}

/// Zero, NaN or an infinity as a float8; other fill values are written as hexadecimal digits.
fn float8(n: f64, dtype: DType) -> Option<u8> {
    match dtype {
        DType::F8E8M0 => n.is_nan().then_some(0xff),
        DType::F8E4M3 | DType::F8E5M2 | DType::F8E4M3Fnuz | DType::F8E5M2Fnuz if n == 0.0 && n.is_sign_positive() => {
            Some(0)
        }
        DType::F8E4M3 => n.is_nan().then_some(0x7f),
        DType::F8E4M3Fnuz | DType::F8E5M2Fnuz => n.is_nan().then_some(0x80),
        DType::F8E5M2 if n.is_infinite() => Some(if n > 0.0 { 0x7c } else { 0xfc }),
        DType::F8E5M2 => n.is_nan().then_some(0x7e),
        _ => None,
    }
}

fn integer(n: &serde_json::Number) -> Option<i128> {
    n.as_u64().map(i128::from).or_else(|| n.as_i64().map(i128::from))
}

/// The bytes of an element given as "0x" and hexadecimal digits, two for each byte (Zarr 3, "Fill value").
fn bits(text: &str, size: usize, lenient: bool) -> Option<Vec<u8>> {
    let digits = text.strip_prefix("0x")?;
    let whole = digits.len() == 2 * size && digits.bytes().all(|c| c.is_ascii_hexdigit());
    let bytes = u64::from_str_radix(digits, 16).ok().filter(|_| whole || lenient)?.to_le_bytes();
    let (bytes, beyond) = bytes.split_at_checked(size)?;
    beyond.iter().all(|b| *b == 0).then(|| bytes.to_vec())
}
