//! Inputs near a seed: the same ones in every run, so that a failure of a test repeats.

/// Numbers that files lie with: sizes, counts and offsets near the limits of their types.
const NUMBERS: [u64; 8] = [0, 1 << 16, (1 << 31) - 1, (1 << 32) - 1, 1 << 32, 1 << 40, i64::MAX as u64, u64::MAX];

/// A generator with a fixed seed (splitmix64): its numbers must not change with the version of a crate.
struct Dice(u64);

impl Dice {
    fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.number() % end.max(1) as u64) as usize
    }
}

/// Calls `visit` with the name and the bytes of `count` mutations of a seed.
pub fn visit_mutations(seed: &[u8], count: usize, mut visit: impl FnMut(&str, &[u8])) {
    for length in [0, 1, seed.len() / 4, seed.len() / 2, seed.len() * 3 / 4, seed.len().saturating_sub(1)] {
        visit(&format!("its first {length} bytes"), &seed[..length.min(seed.len())]);
    }
    let mut dice = Dice(0);
    for number in 0..count {
        let mut bytes = seed.to_vec();
        let change = mutate(&mut bytes, &mut dice);
        visit(&format!("mutation {number}: {change}"), &bytes);
    }
}

/// Changes some bytes, and says which.
fn mutate(bytes: &mut Vec<u8>, dice: &mut Dice) -> String {
    let place = dice.below(bytes.len());
    let kind = dice.below(6);
    let Some(byte) = bytes.get_mut(place) else { return "none".to_string() };
    match kind {
        0 | 1 => {
            *byte ^= 1 << dice.below(8);
            format!("a bit of byte {place} flipped")
        }
        2 => {
            *byte = dice.number() as u8;
            format!("byte {place} changed")
        }
        3 | 4 => {
            let number = NUMBERS[dice.below(NUMBERS.len())];
            let width = [2, 4, 8][dice.below(3)].min(bytes.len() - place);
            bytes[place..place + width].copy_from_slice(&number.to_le_bytes()[..width]);
            format!("{width} bytes of {number:#x} from byte {place}")
        }
        _ => {
            let length = dice.below((bytes.len() - place).min(64)) + 1;
            let copy = bytes[place..place + length].to_vec();
            if dice.below(2) == 0 {
                bytes.splice(place..place, copy);
                format!("{length} bytes from byte {place} twice")
            } else {
                bytes.drain(place..place + length);
                format!("{length} bytes from byte {place} removed")
            }
        }
    }
}
