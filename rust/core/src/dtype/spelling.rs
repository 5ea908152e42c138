//! Names and codes of element types: one table for all containers.
//!
//! Names are numpy's and ml_dtypes' (`float8_e4m3fn`), which Zarr 3 and torch share, and torch's short ones (`half`). Codes are
//! numpy's (`<f2`), in `.npy` files, pickles and Zarr 2. A type that cannot be read is known by name, too, so that messages name it.

use super::DType;

/// The meaning of a name or a code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spelling {
    /// An element type.
    Type(DType),
    /// Elements of a type that the code does not name, as unsigned integers of their size.
    Bits(DType),
    /// A type that is not read, and its description.
    Unsupported(&'static str),
    /// No element type.
    Unknown,
}

impl Spelling {
    /// The element type, if it is read.
    pub fn dtype(self) -> Option<DType> {
        match self {
            Spelling::Type(dtype) => Some(dtype),
            _ => None,
        }
    }

    /// A name: `float32`, `bfloat16`, `half`.
    pub fn of_name(name: &str) -> Spelling {
        if let Some(dtype) = DType::ALL.iter().copied().find(|dtype| dtype.numpy_name() == Some(name)) {
            return Spelling::Type(dtype);
        }
        Spelling::Type(match name {
            "double" => DType::F64,
            "float" => DType::F32,
            "half" => DType::F16,
            "long" => DType::I64,
            "int" => DType::I32,
            "short" => DType::I16,
            "complex_float32" | "cfloat" => DType::C64,
            "float8_e4m3" => return Spelling::Unsupported("8-bit floats with infinities"),
            "float8_e3m4" | "float8_e4m3b11fnuz" => return Spelling::Unsupported("8-bit floats"),
            "float6_e2m3fn" | "float6_e3m2fn" => return Spelling::Unsupported("6-bit floats"),
            "float4_e2m1fn" | "float4_e2m1fn_x2" => return Spelling::Unsupported("4-bit floats"),
            "int4" | "uint4" | "int2" | "uint2" | "int1" | "uint1" => {
                return Spelling::Unsupported("integers of less than a byte");
            }
            "float128" | "float96" | "longdouble" => return Spelling::Unsupported("long doubles"),
            "complex_float64" | "complex_bfloat16" | "complex_float16" | "complex128" | "complex256" | "complex32"
            | "bcomplex32" => return Spelling::Unsupported("complex numbers of another size than complex64"),
            "numpy.datetime64" | "numpy.timedelta64" => return Spelling::Unsupported("times"),
            _ => return Spelling::Unknown,
        })
    }

    /// A code of numpy, and whether it is byte-swapped: `<f2`, `>i4`, `|V2`. Codes may also be names, as ml_dtypes' users write.
    pub fn of_code(code: &str) -> (Spelling, bool) {
        let (order, bare) = match code.as_bytes().first() {
            Some(order @ (b'<' | b'>' | b'=' | b'|')) => (*order, &code[1..]),
            _ => (b'=', code),
        };
        let size = bare.get(1..).filter(|size| size.bytes().all(|digit| digit.is_ascii_digit()));
        // numpy reads "i04" as "i4".
        let shown = size.map(|size| format!("{}{}", &bare[..1], size.trim_start_matches('0')));
        let spelling = match shown.as_deref().unwrap_or(bare) {
            "?" => Spelling::Type(DType::Bool),
            "b1" => Spelling::Type(DType::Bool),
            "i1" => Spelling::Type(DType::I8),
            "i2" => Spelling::Type(DType::I16),
            "i4" => Spelling::Type(DType::I32),
            "i8" => Spelling::Type(DType::I64),
            "u1" => Spelling::Type(DType::U8),
            "u2" => Spelling::Type(DType::U16),
            "u4" => Spelling::Type(DType::U32),
            "u8" => Spelling::Type(DType::U64),
            // The only type of ml_dtypes with the kind of floats.
            "f1" => Spelling::Type(DType::F8E5M2),
            "f2" => Spelling::Type(DType::F16),
            "f4" => Spelling::Type(DType::F32),
            "f8" => Spelling::Type(DType::F64),
            "c8" => Spelling::Type(DType::C64),
            // All other types of ml_dtypes.
            "V1" => Spelling::Bits(DType::U8),
            "V2" => Spelling::Bits(DType::U16),
            "f12" | "f16" => Spelling::Unsupported("long doubles"),
            "c16" | "c24" | "c32" | "W4" => Spelling::Unsupported("complex numbers of another size than complex64"),
            "O" => Spelling::Unsupported("Python objects, which are pickled"),
            _ if bare.starts_with(['M', 'm']) => Spelling::Unsupported("times"),
            _ if bare.starts_with('V') && bare[1..].bytes().all(|digit| digit.is_ascii_digit()) => {
                Spelling::Unsupported("records or bytes of an unknown type")
            }
            _ => Spelling::of_name(bare),
        };
        let is_wide = match spelling {
            Spelling::Type(dtype) | Spelling::Bits(dtype) => dtype.bits() > 8,
            _ => false,
        };
        (spelling, order == b'>' && is_wide)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_type_of_numpy_and_ml_dtypes_is_known_by_name() {
        for dtype in DType::ALL {
            if let Some(name) = dtype.numpy_name() {
                assert_eq!(Spelling::of_name(name), Spelling::Type(*dtype));
                assert_eq!(Spelling::of_code(name), (Spelling::Type(*dtype), false));
            }
        }
        for name in ["int4", "float4_e2m1fn", "float8_e3m4", "complex128", "float128"] {
            assert!(matches!(Spelling::of_name(name), Spelling::Unsupported(_)), "{name}");
        }
        assert_eq!(Spelling::of_name("float7"), Spelling::Unknown);
    }

    #[test]
    fn codes_have_a_byte_order_where_elements_have_several_bytes() {
        assert_eq!(Spelling::of_code(">f2"), (Spelling::Type(DType::F16), true));
        assert_eq!(Spelling::of_code(">i1"), (Spelling::Type(DType::I8), false));
        assert_eq!(Spelling::of_code("<f1"), (Spelling::Type(DType::F8E5M2), false));
        assert_eq!(Spelling::of_code("|V2"), (Spelling::Bits(DType::U16), false));
        assert_eq!(Spelling::of_code(">V2"), (Spelling::Bits(DType::U16), true));
        assert!(matches!(Spelling::of_code("<M8[ns]").0, Spelling::Unsupported("times")));
        assert_eq!(Spelling::of_code("").0, Spelling::Unknown);
        assert_eq!(Spelling::of_code("é").0, Spelling::Unknown);
    }
}
