//! Scaled codes: their types, and the value of each byte. Two kernels use them.

use super::portable::{narrow_bf16, widen_bf16};

/// The meaning of a byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaledCode {
    /// float8 with 4 bits of exponent, without infinities ("fn").
    E4M3,
    /// float8 with 5 bits of exponent, with infinities.
    E5M2,
    /// A signed integer.
    I8,
}

/// The type of products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Product {
    /// bfloat16.
    BF16,
    /// float32.
    F32,
}

impl Product {
    /// Bytes per element.
    pub fn size(self) -> usize {
        match self {
            Product::BF16 => 2,
            Product::F32 => 4,
        }
    }

    /// A scale as the multiplication uses it.
    pub fn rounded(self, scale: f32) -> f32 {
        match self {
            Product::BF16 => widen_bf16(narrow_bf16(scale)),
            Product::F32 => scale,
        }
    }
}

/// The values of all bytes, exact.
pub(super) struct CodeValues {
    /// As float32.
    pub f32: [f32; 256],
    /// The low bytes of bfloat16.
    pub low: [u8; 256],
    /// The high bytes of bfloat16.
    pub high: [u8; 256],
}

impl CodeValues {
    const fn of(code: ScaledCode) -> CodeValues {
        let mut made = CodeValues { f32: [0.0; 256], low: [0; 256], high: [0; 256] };
        let mut byte = 0;
        while byte < 256 {
            let value = match code {
                ScaledCode::E4M3 => e4m3(byte as u8),
                ScaledCode::E5M2 => e5m2(byte as u8),
                ScaledCode::I8 => int8(byte as u8),
            };
            // At most 8 significant bits: the lower half is zero.
            let upper = (value.to_bits() >> 16) as u16;
            made.f32[byte] = value;
            made.low[byte] = upper as u8;
            made.high[byte] = (upper >> 8) as u8;
            byte += 1;
        }
        made
    }
}

impl ScaledCode {
    pub(super) fn values(self) -> &'static CodeValues {
        static E4M3: CodeValues = CodeValues::of(ScaledCode::E4M3);
        static E5M2: CodeValues = CodeValues::of(ScaledCode::E5M2);
        static I8: CodeValues = CodeValues::of(ScaledCode::I8);
        match self {
            ScaledCode::E4M3 => &E4M3,
            ScaledCode::E5M2 => &E5M2,
            ScaledCode::I8 => &I8,
        }
    }
}

/// Branch-free so that it vectorises; so are the others.
#[inline(always)]
pub(super) const fn e4m3(code: u8) -> f32 {
    let magnitude = (code & 0x7f) as u32;
    let normal = f32::from_bits((magnitude << 20) + (120 << 23));
    let small = magnitude as i32 as f32 * (1.0 / 512.0);
    let found = if magnitude < 8 { small } else { normal };
    let found = if magnitude == 0x7f { f32::NAN } else { found };
    f32::from_bits(found.to_bits() | ((code & 0x80) as u32) << 24)
}

#[inline(always)]
pub(super) const fn e5m2(code: u8) -> f32 {
    let magnitude = (code & 0x7f) as u32;
    let normal = f32::from_bits((magnitude << 21) + (112 << 23));
    let small = magnitude as i32 as f32 * (1.0 / 65_536.0);
    let found = if magnitude < 4 { small } else { normal };
    let found = if magnitude == 0x7c { f32::INFINITY } else { found };
    let found = if magnitude > 0x7c { f32::NAN } else { found };
    f32::from_bits(found.to_bits() | ((code & 0x80) as u32) << 24)
}

#[inline(always)]
pub(super) const fn int8(code: u8) -> f32 {
    code as i8 as f32
}
