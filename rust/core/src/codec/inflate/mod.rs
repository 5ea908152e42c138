//! Gzip files, inflated whole into memory of bounded size.
//!
//! libdeflate inflates a 105 MB shard of random float32 at 468 MB/s, zlib-rs at 311 (benches/README.md). It works on whole
//! buffers, so zlib-rs first inflates the beginning: data that is not a pickle is rejected after 64 KiB, whatever size it
//! claims.
//!
//! A large file with one member is inflated by several threads if they are free (`parallel`).
//!
//! Source: RFC 1952. A file has one or more members, each with its own checksum and length; libdeflate checks both.

#[doc(hidden)] // for the fuzz target
pub mod blocks;
mod libdeflate;
mod parallel;

use std::io::Read;

use flate2::{Decompress, FlushDecompress, Status};

use self::libdeflate::{Inflater, Outcome};
use self::parallel::Beside;
use crate::error::{Error, Finding, Kind, Result};
use crate::memory;
use crate::memory::buffer::Buffer;
use crate::number::to_usize;
use crate::source::Source;
use crate::threads::{self, Context, Lock, Stop, Watch};

/// The maximum ratio of deflate (RFC 1951: 258 bytes from 2 bits).
const BEST_RATIO: u64 = 1032;

/// The first `most` inflated bytes, or fewer before the end or an error.
pub fn front(gz: &[u8], most: usize) -> Vec<u8> {
    let mut made = vec![];
    // Errors are reported later, when the whole file is inflated.
    let _ = flate2::read::MultiGzDecoder::new(gz).take(most as u64).read_to_end(&mut made);
    made
}

/// Whether these are the first bytes of a gzip member.
pub fn is_gzip(bytes: &[u8]) -> bool {
    bytes.starts_with(&[0x1f, 0x8b])
}

/// Any file may inflate to this size.
const ALWAYS: u64 = 64 << 20;
/// Any file may also inflate to this multiple of its size, regardless of the memory for decoded bytes. The published text of
/// pickle shards expects less than 10; activations never reach 16.
const USUAL_RATIO: u64 = 16;

/// Bytes that a file of `stored` bytes may inflate to: the declared size, but at most the largest of 64 MiB, `memory`
/// (the user's memory for decoded bytes) and sixteen times the file. The declared size alone is not enough: it is as
/// untrusted as the file.
pub fn allowed(stored: u64, declared: u64, memory: u64) -> u64 {
    declared.min(memory.max(ALWAYS).max(stored.saturating_mul(USUAL_RATIO))).min(stored.saturating_mul(BEST_RATIO))
}

/// The error for a file that inflates to more than allowed.
pub fn too_large(limit: u64) -> Error {
    Error::new(
        Kind::Format,
        format!(
            "inflates to more than the {limit} bytes that its metadata, its size and decoded_memory allow. If the file is trusted, \
             raise decoded_memory"
        ),
    )
    .finds(Finding::Gzip)
}

/// The inflated size in the last four bytes of a gzip file of `stored` bytes, limited by deflate's maximum ratio. A guess: it
/// covers only the last member.
pub fn claimed(last: [u8; 4], stored: u64) -> u64 {
    u64::from(u32::from_le_bytes(last)).min(stored.saturating_mul(BEST_RATIO))
}

/// The inflated size that a gzip file claims; a guess, see [`claimed`].
pub fn guess(gz: &[u8]) -> u64 {
    claimed(gz.last_chunk().copied().unwrap_or_default(), gz.len() as u64)
}

/// Inflates all members to at most `limit` bytes and calls `beside` at the same time if threads are free. If both fail,
/// returns the error of `beside`.
pub fn inflate_beside(gz: &[u8], limit: u64, beside: Beside<'_>, watch: Watch<'_>) -> Result<Buffer> {
    if !threads::are_free() {
        beside(&mut *watch)?;
        return inflate(gz, limit, &mut Context::of_caller(watch));
    }
    let size = guess(gz);
    // With several members the guess covers only the last: usually less than the file's size, and otherwise detected at the
    // end by the checksum.
    let whole = size >= gz.len() as u64 && size <= limit;
    let plan = if whole { parallel::plan(gz, &mut *watch)? } else { None };
    if let Some(plan) = plan {
        return match parallel::inflate(gz, &plan, size, beside, &mut *watch)? {
            Some(block) => Ok(block),
            None => inflate(gz, limit, &mut Context::of_caller(watch)),
        };
    }
    let made: Lock<Option<Buffer>> = Lock::default();
    let work = |part: usize, stop: &Stop| match part {
        0 => beside(&mut || stop.is_set()),
        _ => {
            *made.lock() = Some(inflate(gz, limit, &mut Context::of_part(stop))?);
            Ok(())
        }
    };
    threads::run(2, &work, watch)?;
    let made = made.into_inner();
    made.ok_or_else(|| Error::new(Kind::Internal, "nothing was inflated"))
}

/// Inflates all members to at most `limit` bytes. Members that are not small are inflated in steps.
pub fn inflate(gz: &[u8], limit: u64, context: &mut Context<'_>) -> Result<Buffer> {
    if !is_gzip(gz) {
        return Err(Error::new(
            Kind::Format,
            format!("expected a gzip file, found one that begins with {:02x?}", &gz[..gz.len().min(2)]),
        )
        .finds(Finding::Gzip)
        .byte(0));
    }
    let most = limit.min((gz.len() as u64).saturating_mul(BEST_RATIO));
    let no_memory = |e| Error::new(Kind::NoMemory, format!("cannot allocate memory to inflate into: {e}"));
    // A truncated file ends in data, so the guess may be any number; it decides only the first size of the buffer.
    let mut out = Buffer::new(to_usize(guess(gz).min(most).max(1))).map_err(no_memory)?;
    let mut inflater = Inflater::new()?;
    let (mut read, mut made, mut last) = (0usize, 0usize, 0usize);
    while read < gz.len() {
        context.check()?;
        // Zeros may follow the last member (RFC 1952 does not mention them; Python skips them).
        if read > 0 && gz[read..].iter().all(|b| *b == 0) {
            break;
        }
        if !is_gzip(&gz[read..]) {
            return Err(Error::new(Kind::Format, "expected another gzip member or the end of the file")
                .finds(Finding::Gzip)
                .byte(read as u64));
        }
        let (member, space) = (&gz[read..], &mut out.bytes_mut()[made..]);
        // In a file of many members, the next one is probably as short as the last.
        let is_short = member.len().max(space.len()) as u64 <= MEMBER || (1..=to_usize(MEMBER)).contains(&last);
        let outcome = if is_short { inflater.member(member, space) } else { in_steps(member, space, context)? };
        match outcome {
            Outcome::Done { read: r, made: m } => {
                read += r;
                made += m;
                last = m;
            }
            Outcome::Full => {
                // Several members, or more than 4 GiB: retry this member with twice the space.
                let next = (out.len() as u64 * 2).max(made as u64 + 65_536).min(most);
                if next <= out.len() as u64 {
                    return Err(too_large(limit));
                }
                let mut larger = Buffer::new(to_usize(next)).map_err(no_memory)?;
                larger.bytes_mut()[..made].copy_from_slice(&out[..made]);
                out = larger;
            }
            Outcome::Bad => {
                return Err(why_bad(&gz[read..], (most - made as u64).saturating_add(1), context)?.byte(read as u64));
            }
        }
    }
    out.truncate(made);
    Ok(out)
}

/// Inflates the first gzip member in steps, and checks its checksum and length.
fn in_steps(gz: &[u8], out: &mut [u8], context: &mut Context<'_>) -> Result<Outcome> {
    let mut member = flate2::bufread::GzDecoder::new(gz);
    let (mut made, mut more) = (0usize, [0]);
    loop {
        context.check()?;
        let step = made.saturating_add(STEP).min(out.len());
        // The end is read with at least one byte of room.
        let (into, is_full) = if made < step { (&mut out[made..step], false) } else { (&mut more[..], true) };
        match member.read(into) {
            Ok(0) => return Ok(Outcome::Done { read: gz.len() - member.into_inner().len(), made }),
            Ok(_) if is_full => return Ok(Outcome::Full),
            Ok(n) => made += n,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => return Ok(Outcome::Bad),
        }
    }
}

/// The first `most` bytes of deflate data, or fewer before the end or an error.
pub fn raw_front(data: &[u8], most: usize) -> Vec<u8> {
    let mut made = vec![];
    // Errors are reported later, when all of it is inflated.
    let _ = flate2::read::DeflateDecoder::new(data).take(most as u64).read_to_end(&mut made);
    made
}

/// Deflated data up to this size are inflated at once, by libdeflate: it is faster, but cannot be stopped.
const WHOLE: u64 = if cfg!(test) { 1 << 18 } else { 64 << 20 };
/// A member of this many bytes, and room for as many, is inflated at once: half a second.
const MEMBER: u64 = if cfg!(test) { 1 << 18 } else { 256 << 20 };
/// Bytes that are inflated between two calls of the watch.
const STEP: usize = if cfg!(test) { 1 << 16 } else { 4 << 20 };

/// Deflated data (RFC 1951) in a file.
#[derive(Clone, Copy, Debug)]
pub struct DeflatedRange<'a> {
    /// The file.
    pub source: &'a dyn Source,
    /// Offset of the first byte.
    pub at: u64,
    /// Bytes in the file.
    pub stored: u64,
    /// Bytes of the content.
    pub size: u64,
}

impl DeflatedRange<'_> {
    fn damaged(&self) -> Error {
        Error::new(Kind::Format, format!("expected deflated data of {} bytes, found other data", self.size))
            .byte(self.at)
    }

    /// The content.
    pub fn content(&self, context: &mut Context<'_>) -> Result<Vec<u8>> {
        let least = self.size.div_ceil(BEST_RATIO).saturating_sub(1);
        // Even data that do not compress grow by less than a thousandth.
        if self.stored < least || self.stored > self.size.saturating_mul(2).saturating_add(1 << 16) {
            return Err(self.damaged());
        }
        if self.stored.max(self.size) > WHOLE {
            let mut content = memory::reserve(self.size)?;
            self.each(context, &mut |some| content.extend_from_slice(some))?;
            return Ok(content);
        }
        let mut packed = memory::bytes(self.stored)?;
        self.source.read(self.at, &mut packed, context.stop())?;
        // One byte more: data that inflate further are damaged, not complete.
        let mut content = memory::bytes(self.size + 1)?;
        match Inflater::new()?.raw(&packed, &mut content) {
            Outcome::Done { read, made } if read == packed.len() && made as u64 == self.size => {
                content.truncate(made);
                Ok(content)
            }
            _ => Err(self.damaged()),
        }
    }

    /// Passes the content to `sink`, piece by piece; fails after the last if there is more or less than expected.
    pub fn each(&self, context: &mut Context<'_>, sink: &mut dyn FnMut(&[u8])) -> Result<()> {
        let mut inflater = Decompress::new(false);
        let (mut packed, mut piece) = (memory::bytes(self.stored.min(STEP as u64))?, memory::bytes(STEP as u64)?);
        let (mut fed, mut ended) = (0, false);
        while fed < self.stored {
            let n = packed.len().min(to_usize(self.stored - fed));
            self.source.read(self.at + fed, &mut packed[..n], context.stop())?;
            fed += n as u64;
            let mut rest = &packed[..n];
            loop {
                let before = (inflater.total_in(), inflater.total_out());
                let status = inflater.decompress(rest, &mut piece, FlushDecompress::None);
                let (read, made) = (inflater.total_in() - before.0, inflater.total_out() - before.1);
                rest = &rest[to_usize(read)..];
                if ended || status.is_err() || inflater.total_out() > self.size {
                    return Err(self.damaged());
                }
                sink(&piece[..to_usize(made)]);
                context.check()?;
                ended = matches!(status, Ok(Status::StreamEnd));
                if ended && !rest.is_empty() {
                    return Err(self.damaged());
                }
                // A full piece may not be all that the bytes read so far inflate to.
                if ended || (rest.is_empty() && to_usize(made) < piece.len()) || (read == 0 && made == 0) {
                    break;
                }
            }
        }
        if ended && inflater.total_out() == self.size { Ok(()) } else { Err(self.damaged()) }
    }
}

/// Why inflating a member failed: libdeflate does not distinguish damage from truncation.
fn why_bad(member: &[u8], most: u64, context: &mut Context<'_>) -> Result<Error> {
    let mut one = flate2::bufread::GzDecoder::new(member);
    let mut left = most;
    let ended = loop {
        context.check()?;
        match std::io::copy(&mut (&mut one).take(left.min(STEP as u64)), &mut std::io::sink()) {
            Ok(0) => break None,
            Ok(n) => left -= n,
            Err(error) => break Some(error.kind()),
        }
    };
    let detail = match ended {
        Some(std::io::ErrorKind::UnexpectedEof) => "the gzip data end too early: the file is truncated",
        _ => "the gzip data are damaged: inflating fails, or the checksum (CRC-32) or length does not match",
    };
    Ok(Error::new(Kind::Format, detail).finds(Finding::Gzip))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use crate::location::Location;
    use crate::source::held::Held;
    use proptest::prelude::*;
    use std::io::Write;

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::GzBuilder::new().filename("x").write(vec![], flate2::Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    proptest! {
        #[test]
        fn members_come_back_joined(parts in prop::collection::vec(prop::collection::vec(0u8..4, 0..5000), 1..5), zeros in 0usize..3) {
            let mut gz: Vec<u8> = parts.iter().flat_map(|p| gzip(p)).collect();
            gz.resize(gz.len() + zeros, 0);
            let whole: Vec<u8> = parts.concat();
            prop_assert_eq!(&inflate(&gz, 1 << 20, &mut Context::of_part(&Stop::new())).unwrap()[..], &whole[..]);
            prop_assert_eq!(&front(&gz, 100)[..], &whole[..whole.len().min(100)]);
            if whole.len() > 1 {
                prop_assert!(inflate(&gz, whole.len() as u64 - 1, &mut Context::of_part(&Stop::new())).is_err());
            }
        }

        #[test]
        fn damage_is_refused_or_harmless(bytes in prop::collection::vec(any::<u8>(), 1..300), at in any::<prop::sample::Index>(), flip in 1u8..=255, cut in any::<prop::sample::Index>()) {
            let gz = gzip(&bytes);
            let mut damaged = gz.clone();
            *at.get_mut(&mut damaged[..]) ^= flip;
            if let Ok(found) = inflate(&damaged, 1 << 20, &mut Context::of_part(&Stop::new())) {
                // Only the header has unused bits.
                prop_assert_eq!(&found[..], &bytes[..]);
            }
            prop_assert!(inflate(&gz[..cut.index(gz.len())], 1 << 20, &mut Context::of_part(&Stop::new())).is_err());
        }
    }

    /// Pseudo-random numbers of few or many different bytes, with near and far repetitions: large enough for many stretches.
    fn material(seed: u64, size: usize, kinds: u64, repeats: bool) -> Vec<u8> {
        let mut x = seed | 1;
        let mut next = move || {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            x
        };
        let mut made: Vec<u8> = Vec::with_capacity(size + 300);
        while made.len() < size {
            if repeats && made.len() > 40_000 && next() % 500 == 0 {
                let (back, n) = ((next() % 32_000) as usize + 1, (next() % 200) as usize);
                let from = made.len() - back;
                for i in from..from + n {
                    made.push(made[i]);
                }
            } else {
                made.push((((next() >> 20) & 0xff) % kinds.max(1)) as u8);
            }
        }
        made
    }

    #[test]
    fn many_threads_inflate_what_one_does() {
        // Fixed (level 1 here) and stored blocks have no header to search for, and text of three letters always refers to
        // its window.
        let cases = [
            (120, false, 2, true),
            (150, true, 6, true),
            (60, true, 1, false),
            (200, false, 0, false),
            (3, true, if cfg!(debug_assertions) { 5 } else { 9 }, false),
        ];
        for (i, (kinds, repeats, level, possible)) in cases.into_iter().enumerate() {
            let bytes = material(i as u64 + 7, 10 << 20, kinds, repeats);
            let mut encoder = flate2::GzBuilder::new().comment("c").write(vec![], flate2::Compression::new(level));
            encoder.write_all(&bytes).unwrap();
            let gz = encoder.finish().unwrap();
            let looked = std::sync::atomic::AtomicUsize::new(0);
            let beside = |_: Watch<'_>| {
                looked.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                Ok(())
            };
            let go_on = &mut || false;
            let plan = parallel::plan(&gz, go_on).unwrap();
            assert_eq!(plan.is_some(), possible, "case {i}");
            if let Some(plan) = plan {
                let many = parallel::inflate(&gz, &plan, bytes.len() as u64, &|_| Ok(()), go_on).unwrap();
                assert!(many.unwrap()[..] == bytes[..], "case {i}");
            }
            assert!(inflate_beside(&gz, 1 << 30, &beside, go_on).unwrap()[..] == bytes[..]);
            assert_eq!(looked.into_inner(), 1);

            let mut damaged = gz.clone();
            let at = gz.len() / 2;
            damaged[at] ^= 0x10;
            assert!(inflate_beside(&damaged, 1 << 30, &|_| Ok(()), go_on).is_err(), "case {i}");
            assert!(inflate_beside(&gz[..gz.len() - 9], 1 << 30, &|_| Ok(()), go_on).is_err(), "case {i}");
            let twice = [&gz[..], &gz[..]].concat();
            assert_eq!(inflate_beside(&twice, 1 << 30, &|_| Ok(()), go_on).unwrap().len(), 2 * bytes.len());
            assert!(inflate_beside(&gz, bytes.len() as u64 - 1, &|_| Ok(()), go_on).is_err());
            let failing = |_: Watch<'_>| Err(Error::new(Kind::Format, "beside"));
            assert_eq!(inflate_beside(&gz, 1 << 30, &failing, go_on).unwrap_err().detail, "beside");
        }
    }

    #[test]
    fn deflated_data_have_the_size_that_is_claimed() {
        let bytes = material(5, (WHOLE + STEP as u64) as usize + 77, 3, true);
        for bytes in [&bytes[..], &bytes[..9000], &bytes[..0]] {
            let mut encoder = flate2::write::DeflateEncoder::new(vec![], flate2::Compression::fast());
            encoder.write_all(bytes).unwrap();
            let packed = encoder.finish().unwrap();
            let longer = [&packed[..], &[0]].concat();
            let n = bytes.len() as u64;
            for (packed, size, whole) in
                [(&packed, n, true), (&packed, n + 1, false), (&longer, n, false), (&packed, n.max(1) - 1, n == 0)]
            {
                for cut in if whole { [0, 1, packed.len() / 2] } else { [0; 3] } {
                    let stored = &packed[..packed.len() - cut];
                    let source = Held::new(Location::object("test", "a"), stored.to_vec().into());
                    let deflated = DeflatedRange { source: &source, at: 0, stored: stored.len() as u64, size };
                    let content = deflated.content(&mut Context::of_part(&Stop::new()));
                    assert_eq!(content.is_ok_and(|content| content == bytes), whole && cut == 0);
                    let mut pieces = vec![];
                    let ended =
                        deflated.each(&mut Context::of_part(&Stop::new()), &mut |some| pieces.extend_from_slice(some));
                    assert_eq!(ended.is_ok() && pieces == bytes, whole && cut == 0);
                }
                let source = Held::new(Location::object("test", "a"), packed.clone().into());
                let deflated = DeflatedRange { source: &source, at: 0, stored: packed.len() as u64, size };
                assert!(deflated.each(&mut Context::of_caller(&mut || true), &mut |_| ()).is_err());
            }
        }
    }

    #[test]
    fn a_long_member_ends_when_its_context_does() {
        let gz = gzip(&vec![7; 64 * STEP]);
        let mut looks = 0;
        let mut watch = || {
            looks += 1;
            looks == 9
        };
        let error = inflate(&gz, 1 << 30, &mut Context::of_caller(&mut watch)).unwrap_err();
        assert_eq!((error.kind, looks), (Kind::Interrupted, 9));
        // Also while the reason of damage is looked for, which inflates it again.
        let mut damaged = gz.clone();
        let last = damaged.len() - 5;
        damaged[last] ^= 1;
        assert_eq!(inflate(&damaged, 1 << 30, &mut Context::of_part(&Stop::new())).unwrap_err().kind, Kind::Format);
        let (mut looks, mut all) = (0, 0);
        let _ = inflate(
            &damaged,
            1 << 30,
            &mut Context::of_caller(&mut || {
                all += 1;
                false
            }),
        );
        let mut watch = || {
            looks += 1;
            looks == all
        };
        let error = inflate(&damaged, 1 << 30, &mut Context::of_caller(&mut watch)).unwrap_err();
        assert_eq!(error.kind, Kind::Interrupted);
    }

    #[test]
    fn a_bomb_is_refused_when_the_limit_is_reached() {
        let gz = gzip(&vec![0; 20 << 20]);
        let error = inflate(&gz, 1 << 20, &mut Context::of_part(&Stop::new())).unwrap_err();
        assert!(error.detail.contains("1048576"), "{error}");
        assert_eq!(inflate(&gz, 20 << 20, &mut Context::of_part(&Stop::new())).unwrap().len(), 20 << 20);
    }

    #[test]
    fn the_limit_follows_from_the_bytes_that_are_there() {
        // The declared size cannot exceed the limit from the file's size and the user's memory.
        assert_eq!(allowed(10 << 20, u64::MAX, 1 << 30), 1 << 30);
        assert_eq!(allowed(10 << 20, u64::MAX, 0), 160 << 20);
        assert_eq!(allowed(1 << 20, u64::MAX, 0), 64 << 20);
        assert_eq!(allowed(1 << 30, u64::MAX, 1 << 30), 16 << 30);
        // The declared size can lower the limit.
        assert_eq!(allowed(1 << 30, 1 << 20, 1 << 30), 1 << 20);
        // Deflate's maximum ratio.
        assert_eq!(allowed(100, u64::MAX, 1 << 30), 103_200);
        assert_eq!(allowed(u64::MAX, u64::MAX, u64::MAX), u64::MAX);
    }

    #[test]
    fn a_file_that_is_cut_short_is_told_from_a_damaged_and_a_large_one() {
        let bytes = material(3, 300_000, 150, true);
        let gz = gzip(&bytes);
        for cut in (10..gz.len()).step_by(gz.len() / 40) {
            let error = inflate(&gz[..cut], 1 << 19, &mut Context::of_part(&Stop::new())).unwrap_err();
            assert!(error.detail.contains("end too early"), "{cut}: {error}");
        }
        let mut damaged = gz.clone();
        let last = gz.len() - 5;
        damaged[last] ^= 1; // the checksum
        assert!(
            inflate(&damaged, 1 << 20, &mut Context::of_part(&Stop::new())).unwrap_err().detail.contains("damaged")
        );
        // A truncated file whose last bytes claim 4 GiB.
        let mut claims = gz[..gz.len() / 2].to_vec();
        let n = claims.len();
        claims[n - 4..].fill(0xff);
        let error = inflate(&claims, 1 << 20, &mut Context::of_part(&Stop::new())).unwrap_err();
        assert!(!error.detail.contains("inflates to more"), "{error}");
    }

    /// Inputs of all kinds: damaged, truncated and concatenated members, and trailing bytes.
    fn as_another_decoder(gz: &[u8], limit: u64) -> Option<Vec<u8>> {
        let mut rest = gz;
        let mut made = vec![];
        while !rest.is_empty() {
            if !made.is_empty() | (rest.len() < gz.len()) && rest.iter().all(|b| *b == 0) {
                break;
            }
            let mut one = flate2::bufread::GzDecoder::new(rest);
            (&mut one).take(limit + 1).read_to_end(&mut made).ok()?;
            if made.len() as u64 > limit {
                return None;
            }
            rest = one.into_inner();
        }
        (!gz.is_empty()).then_some(made)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        #[test]
        fn any_bytes_are_inflated_as_by_another_decoder(
            parts in prop::collection::vec((0u64..1000, 0usize..20_000, 1u64..=256, any::<bool>(), 0u32..=9), 1..4),
            flips in prop::collection::vec((any::<prop::sample::Index>(), 1u8..=255), 0..3),
            cut in prop::option::of(any::<prop::sample::Index>()),
            tail in prop::collection::vec(any::<u8>(), 0..6),
        ) {
            let mut gz = vec![];
            for (seed, size, kinds, repeats, level) in parts {
                let mut encoder = flate2::GzBuilder::new().write(&mut gz, flate2::Compression::new(level));
                encoder.write_all(&material(seed, size, kinds, repeats)).unwrap();
                encoder.finish().unwrap();
            }
            gz.extend(tail);
            for (at, flip) in flips {
                *at.get_mut(&mut gz[..]) ^= flip;
            }
            if let Some(cut) = cut {
                gz.truncate(cut.index(gz.len()));
            }
            let limit = 1 << 17;
            prop_assert_eq!(inflate(&gz, limit, &mut Context::of_part(&Stop::new())).ok().map(|b| b.to_vec()), as_another_decoder(&gz, limit));
        }
    }
}
