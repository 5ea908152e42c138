//! Conversion of a block of memory with all threads.

use crate::dtype::Cast;
use crate::error::{Error, Kind, Result};
use crate::kernels::{self, should_stream};
use crate::threads::{self, Watch};

/// Elements per part.
const PART: usize = 1 << 18;

/// Copies or converts all elements of `src` into `dst`.
pub fn cast(how: Cast<'_>, src: &[u8], dst: &mut [u8], watch: Watch<'_>) -> Result<()> {
    let (from, to) = (how.from_size, how.to_size);
    if !src.len().is_multiple_of(from) || dst.len() != src.len() / from * to {
        let detail = format!("{} bytes of {from} do not fill {} of {to}", src.len(), dst.len());
        return Err(Error::new(Kind::Internal, detail));
    }
    let stream = should_stream(dst.len(), dst.len());
    let parts = src.chunks(PART * from).zip(dst.chunks_mut(PART * to));
    threads::for_each(
        parts,
        &|_, (src, dst), _| {
            kernels::storing(stream, |stores| how.apply_with(src, dst, stores));
            Ok(())
        },
        watch,
    )
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use crate::dtype::DType;

    #[test]
    fn all_parts_are_converted() {
        let src: Vec<f32> = (0..PART * 2 + 5).map(|i| i as f32).collect();
        let mut dst = vec![0f64; src.len()];
        let how = Cast::between(DType::F32, DType::F64).unwrap();
        cast(how, bytemuck::cast_slice(&src), bytemuck::cast_slice_mut(&mut dst), &mut || false).unwrap();
        assert!(dst.iter().enumerate().all(|(i, x)| *x == i as f64));
        let short = cast(how, &[0; 8], &mut [0; 8], &mut || false);
        assert_eq!(short.unwrap_err().kind, Kind::Internal);
    }
}
