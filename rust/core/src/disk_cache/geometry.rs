//! Sizes and offsets of an object's files, and the encoding of its state.
//!
//! ```text
//! data   the object's bytes at their own offsets; sparse
//! state  a head of 8 bytes per block, padded to 4 KiB, then a checksum of 4 bytes per sector; sparse
//! head   units counted for the block: u16, check of it: u16, clock: u8, unused: 3 bytes
//! ```
//! A checksum of 0 means that the sector is absent. Each checksum is seeded with the object's key and the sector's number, so
//! that bytes of another place or object never match.

/// Unit of checksums and of the budget.
pub const SECTOR: u64 = 4 << 10;
/// Unit of downloads.
pub const PAGE: u64 = 64 << 10;
/// Unit of locks and eviction.
pub const BLOCK: u64 = 4 << 20;
/// The largest object that is cached: tables of its blocks are kept in memory.
pub const LARGEST: u64 = 16 << 40;
/// Bytes of a block's head.
pub const HEAD: u64 = 8;
/// Offset of the clock in a head.
pub const CLOCK: u64 = 4;

/// Units of a counted block in addition to its data: its checksums, and metadata of the file system.
const BLOCK_EXTRA: u64 = 2;
/// Units of an object without blocks: its folder, `url`, and metadata of the file system.
const OBJECT_EXTRA: u64 = 6;

/// The geometry of an object of a given size.
#[derive(Clone, Copy, Debug)]
pub struct Geometry {
    pub size: u64,
    /// Seed of its checksums.
    pub seed: u32,
}

impl Geometry {
    pub fn blocks(self) -> u64 {
        self.size.div_ceil(BLOCK)
    }

    /// Bytes of all heads.
    pub fn heads_len(self) -> u64 {
        (self.blocks() * HEAD).next_multiple_of(SECTOR)
    }

    pub fn state_len(self) -> u64 {
        self.sums_at(self.size.div_ceil(SECTOR))
    }

    /// Offset of a sector's checksum in the state.
    pub fn sums_at(self, sector: u64) -> u64 {
        self.heads_len() + sector * 4
    }

    /// Bytes of a page: fewer at the end.
    pub fn page_len(self, page: u64) -> u64 {
        PAGE.min(self.size.saturating_sub(page * PAGE))
    }

    /// Units of an object's files without blocks.
    pub fn object_units(self) -> u64 {
        OBJECT_EXTRA + self.heads_len() / SECTOR
    }

    /// Units of a page's data.
    pub fn page_units(self, page: u64) -> u64 {
        self.page_len(page).div_ceil(SECTOR)
    }

    /// Units of a block with all its pages.
    pub fn most_units(self, block: u64) -> u64 {
        BLOCK_EXTRA + BLOCK.min(self.size.saturating_sub(block * BLOCK)).div_ceil(SECTOR)
    }

    /// Units of a block that has `counted` and gets `more` for pages.
    pub fn grown(self, block: u64, counted: u64, more: u64) -> u64 {
        let first = if counted == 0 { BLOCK_EXTRA } else { 0 };
        (counted + more + first).min(self.most_units(block))
    }

    /// The checksum of a sector's bytes; never 0.
    pub fn sum(self, sector: u64, bytes: &[u8]) -> u32 {
        let place = (sector as u32).wrapping_mul(0x9E37_79B1) ^ ((sector >> 32) as u32);
        crc32c::crc32c_append(self.seed ^ place, bytes).max(1)
    }
}

/// The first half of a head: units, and their check. Damage of a state would otherwise change the budget.
pub fn encode_head(block: u64, units: u64) -> [u8; 4] {
    let units = u16::try_from(units).unwrap_or(u16::MAX);
    let [a, b] = units.to_le_bytes();
    let [c, d] = if units == 0 { [0, 0] } else { check(block, units).to_le_bytes() };
    [a, b, c, d]
}

/// Units of a head; `None` if it is damaged.
pub fn decode_head(block: u64, head: &[u8]) -> Option<u64> {
    let &[a, b, c, d, ..] = head else { return None };
    let units = u16::from_le_bytes([a, b]);
    let expected = if units == 0 { 0 } else { check(block, units) };
    (u16::from_le_bytes([c, d]) == expected).then_some(u64::from(units))
}

fn check(block: u64, units: u16) -> u16 {
    let mixed = (block << 16 ^ u64::from(units) ^ 0x5851_F42D_4C95_7F2D).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed >> 48) as u16
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn heads_survive_and_damage_is_noticed() {
        for block in [0, 1, 77, 1 << 20] {
            for units in [0, 1, 18, 1026] {
                assert_eq!(decode_head(block, &encode_head(block, units)), Some(units));
            }
            assert_eq!(decode_head(block, &[0; 8]), Some(0));
            let head = encode_head(block, 300);
            let damaged = (0..32).map(|bit| {
                let mut head = head;
                head[bit / 8] ^= 1 << (bit % 8);
                decode_head(block, &head)
            });
            assert!(damaged.filter(Option::is_some).count() == 0);
        }
        assert_eq!(decode_head(0, &[1, 0]), None);
    }

    #[test]
    fn sums_depend_on_the_place_and_are_never_zero() {
        let geometry = Geometry { size: 10 * BLOCK, seed: 7 };
        let bytes = [0; SECTOR as usize];
        assert_ne!(geometry.sum(0, &bytes), geometry.sum(1, &bytes));
        assert_ne!(geometry.sum(0, &bytes), Geometry { seed: 8, ..geometry }.sum(0, &bytes));
        assert!((0..1000).all(|n| geometry.sum(n, &[]) != 0));
    }

    #[test]
    fn units_of_blocks_add_up_to_the_whole() {
        for size in [1, SECTOR, PAGE + 1, BLOCK, BLOCK + 1, 3 * BLOCK - 5] {
            let geometry = Geometry { size, seed: 0 };
            for block in 0..geometry.blocks() {
                let pages = block * 64..((block + 1) * 64).min(size.div_ceil(PAGE));
                let grown = pages.fold(0, |units, page| geometry.grown(block, units, geometry.page_units(page)));
                assert_eq!(grown, geometry.most_units(block));
                assert_eq!(geometry.grown(block, grown, 9), grown);
            }
        }
    }
}
