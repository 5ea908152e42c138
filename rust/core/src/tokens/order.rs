//! Levanter's shuffles, equal number for number: the random numbers of JAX and numpy, and permutations made from them.
//!
//! The rules are in `formats/levanter.md` 4. Threefry is Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as
//! 1, 2, 3" (2011), as in JAX with `jax_threefry_partitionable`. PCG64 and its seeding are numpy's (O'Neill, "PCG: A Family of
//! Simple Fast Space-Efficient Statistically Good Algorithms", 2014; `SeedSequence`); bounded integers follow numpy's
//! `Generator.integers` (Lemire, 2019). They are implemented here because numpy does not guarantee that a `Generator` gives the
//! same numbers in its next version.

use crate::error::{Error, Kind, Result};
use crate::threads::{self, ForkSafe, Watch};

/// A key of JAX's random numbers.
pub type Key = [u32; 2];

/// `jax.random.PRNGKey(seed)`.
pub fn key(seed: u64) -> Key {
    [(seed >> 32) as u32, seed as u32]
}

/// Threefry-2x32 with 20 rounds.
fn threefry(key: Key, counter: [u32; 2]) -> [u32; 2] {
    const ROTATIONS: [[u32; 4]; 2] = [[13, 15, 26, 6], [17, 29, 16, 24]];
    let keys = [key[0], key[1], key[0] ^ key[1] ^ 0x1bd1_1bda];
    let [mut a, mut b] = [counter[0].wrapping_add(keys[0]), counter[1].wrapping_add(keys[1])];
    for group in 0..5usize {
        for rotation in ROTATIONS[group % 2] {
            a = a.wrapping_add(b);
            b = b.rotate_left(rotation) ^ a;
        }
        a = a.wrapping_add(keys[(group + 1) % 3]);
        b = b.wrapping_add(keys[(group + 2) % 3]).wrapping_add(group as u32 + 1);
    }
    [a, b]
}

/// Element `i` of `jax.random.split(key, n)`; it is the same for all `n`.
pub fn split(key: Key, i: u32) -> Key {
    threefry(key, [0, i])
}

/// `jax.random.fold_in(key, data)`.
pub fn fold_in(key: Key, data: u32) -> Key {
    threefry(key, [0, data])
}

/// Element `i` of `jax.random.bits(key)`.
fn bits(key: Key, i: u64) -> u32 {
    let [a, b] = threefry(key, [(i >> 32) as u32, i as u32]);
    a ^ b
}

/// `jax.random.randint(key, (), 0, 2**30)`: the seed of a permutation.
pub fn seed_of(key: Key) -> u64 {
    u64::from(bits(split(key, 1), 0) & ((1 << 30) - 1))
}

/// `jax.random.permutation(key, ids)`.
pub fn shuffle(mut key: Key, ids: &mut Vec<u32>) {
    let n = ids.len();
    if n <= 1 {
        return;
    }
    let rounds = (3.0 * (n as f64).ln() / f64::from(u32::MAX).ln()).ceil() as usize;
    for _ in 0..rounds {
        let sub = split(key, 1);
        key = split(key, 0);
        let mut keyed: Vec<(u32, u32)> = ids.iter().enumerate().map(|(i, id)| (bits(sub, i as u64), *id)).collect();
        keyed.sort_by_key(|(sort, _)| *sort);
        ids.clear();
        ids.extend(keyed.iter().map(|(_, id)| *id));
    }
}

/// numpy's `Generator(PCG64(seed))`, limited to bounded integers.
struct Pcg64 {
    state: u128,
    increment: u128,
    /// The unused upper half of the last number.
    half: Option<u32>,
}

impl Pcg64 {
    fn new(seed: u64) -> Pcg64 {
        let words = seed_sequence(seed);
        let wide = |high: u64, low: u64| u128::from(high) << 64 | u128::from(low);
        let mut made = Pcg64 { state: 0, increment: wide(words[2], words[3]) << 1 | 1, half: None };
        made.step();
        made.state = made.state.wrapping_add(wide(words[0], words[1]));
        made.step();
        made
    }

    fn step(&mut self) {
        const MULTIPLIER: u128 = 0x2360_ed05_1fc6_5da4_4385_df64_9fcc_f645;
        self.state = self.state.wrapping_mul(MULTIPLIER).wrapping_add(self.increment);
    }

    fn next_u64(&mut self) -> u64 {
        self.step();
        ((self.state >> 64) as u64 ^ self.state as u64).rotate_right((self.state >> 122) as u32)
    }

    fn next_u32(&mut self) -> u32 {
        if let Some(half) = self.half.take() {
            return half;
        }
        let both = self.next_u64();
        self.half = Some((both >> 32) as u32);
        both as u32
    }

    /// `integers(0, n)`, n at least 1.
    fn below(&mut self, n: u64) -> u64 {
        if n <= 1 {
            return 0;
        }
        if n - 1 == u64::from(u32::MAX) {
            return u64::from(self.next_u32());
        }
        if n - 1 < u64::from(u32::MAX) {
            let n = n as u32;
            let mut product = u64::from(self.next_u32()) * u64::from(n);
            if (product as u32) < n {
                let threshold = n.wrapping_neg() % n;
                while (product as u32) < threshold {
                    product = u64::from(self.next_u32()) * u64::from(n);
                }
            }
            return product >> 32;
        }
        let mut product = u128::from(self.next_u64()) * u128::from(n);
        if (product as u64) < n {
            let threshold = n.wrapping_neg() % n;
            while (product as u64) < threshold {
                product = u128::from(self.next_u64()) * u128::from(n);
            }
        }
        (product >> 64) as u64
    }
}

/// `numpy.random.SeedSequence(seed).generate_state(4, uint64)` for seeds of one or two words.
fn seed_sequence(seed: u64) -> [u64; 4] {
    const POOL: usize = 4;
    let mut hash = 0x43b0_d7e5u32;
    let mut hashed = |value: u32| {
        let mut v = value ^ hash;
        hash = hash.wrapping_mul(0x931e_8875);
        v = v.wrapping_mul(hash);
        v ^ v >> 16
    };
    let mix = |x: u32, y: u32| {
        let v = x.wrapping_mul(0xca01_f9dd).wrapping_sub(y.wrapping_mul(0x4973_f715));
        v ^ v >> 16
    };
    let entropy = [seed as u32, (seed >> 32) as u32, 0, 0];
    let mut pool = entropy.map(&mut hashed);
    for from in 0..POOL {
        for to in 0..POOL {
            if from != to {
                pool[to] = mix(pool[to], hashed(pool[from]));
            }
        }
    }
    let mut hash = 0x8b51_f9ddu32;
    let mut words = [0u32; 8];
    for (i, word) in words.iter_mut().enumerate() {
        let mut v = pool[i % POOL] ^ hash;
        hash = hash.wrapping_mul(0x58f3_8ded);
        v = v.wrapping_mul(hash);
        *word = v ^ v >> 16;
    }
    [0, 1, 2, 3].map(|i| u64::from(words[2 * i]) | u64::from(words[2 * i + 1]) << 32)
}

/// A permutation of 0 to n - 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Simple {
    /// The identity.
    Identity,
    /// A Feistel network.
    Feistel(Feistel),
    /// A linear congruence.
    Linear(Linear),
}

/// The algorithm of a permutation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PermutationKind {
    /// Five rounds of a Feistel network: Levanter's default.
    Feistel,
    /// `(a x + b) mod n` in integers: a permutation for all n.
    Linear,
    /// The same in float64, as Levanter computes it: not a permutation if a x needs more than 53 bits.
    LinearFloat64,
}

/// Five rounds over the bits of n; a result of n or more goes through the network again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Feistel {
    n: u64,
    right: u32,
    keys: [u64; 5],
}

/// `(a x + b) mod n`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Linear {
    n: u64,
    a: u64,
    b: u64,
    float64: bool,
}

impl Simple {
    /// Levanter's permutation of `n` numbers, at most 2^62, for a key.
    pub fn new(how: PermutationKind, n: u64, key: Key) -> Simple {
        if n <= 1 {
            return Simple::Identity;
        }
        let mut random = Pcg64::new(seed_of(key));
        match how {
            PermutationKind::Feistel => {
                let bits = (n - 1).ilog2() + 1;
                let right = bits - bits / 2;
                Simple::Feistel(Feistel { n, right, keys: std::array::from_fn(|_| random.below(1 << right)) })
            }
            PermutationKind::Linear | PermutationKind::LinearFloat64 => {
                let a = loop {
                    let a = 1 + random.below(n - 1);
                    if gcd(a, n) == 1 {
                        break a;
                    }
                };
                Simple::Linear(Linear { n, a, b: random.below(n), float64: how == PermutationKind::LinearFloat64 })
            }
        }
    }

    /// The number at position `x`.
    #[inline]
    pub fn at(&self, x: u64) -> u64 {
        match self {
            Simple::Identity => x,
            Simple::Feistel(feistel) => feistel.at(x),
            Simple::Linear(linear) => linear.at(x),
        }
    }

    /// Its parameters: five round keys, or a and b.
    pub fn parameters(&self) -> Vec<u64> {
        match self {
            Simple::Identity => vec![],
            Simple::Feistel(feistel) => feistel.keys.to_vec(),
            Simple::Linear(linear) => vec![linear.a, linear.b],
        }
    }
}

impl Feistel {
    /// Numbers outside the domain map to themselves. For others the walk ends, because it follows a cycle of a permutation
    /// that contains its starting point.
    #[inline]
    fn at(&self, x: u64) -> u64 {
        if x >= self.n {
            return x;
        }
        let mask = (1u64 << self.right) - 1;
        let mut value = x;
        loop {
            let (mut left, mut right) = (value >> self.right, value & mask);
            for key in self.keys {
                let mixed = (right & mask).wrapping_mul(2_654_435_761).wrapping_add(key) & mask;
                (left, right) = (right, left ^ mixed);
            }
            value = left << self.right | right;
            if value < self.n {
                return value;
            }
        }
    }
}

impl Linear {
    #[inline]
    fn at(&self, x: u64) -> u64 {
        if self.float64 {
            return ((self.a as f64 * x as f64 + self.b as f64) % self.n as f64) as u64;
        }
        ((u128::from(self.a) * u128::from(x) + u128::from(self.b)) % u128::from(self.n)) as u64
    }
}

fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// Number of windows whose permutations are kept; others are computed on each use.
const KEEP: u64 = 1 << 20;

/// An order of 0 to n - 1.
#[derive(Debug)]
pub struct ExampleOrder {
    n: u64,
    kind: OrderKind,
}

#[derive(Debug)]
enum OrderKind {
    Simple(Simple),
    Block(BlockShuffle),
    Era { how: PermutationKind, era: u64, key: Key, kept: KeptPermutations },
}

/// Levanter's block shuffle: blocks of consecutive numbers are shuffled, then the numbers within each window of blocks.
#[derive(Debug)]
struct BlockShuffle {
    how: PermutationKind,
    io: u64,
    window: u64,
    full: u64,
    blocks: Simple,
    within: Key,
    tail: Simple,
    kept: KeptPermutations,
}

/// Permutations, by window or era.
#[derive(Debug, Default)]
struct KeptPermutations(ForkSafe<Vec<Option<Simple>>>);

impl KeptPermutations {
    fn get(&self, number: u64, make: impl Fn() -> Simple) -> Simple {
        if number >= KEEP {
            return make();
        }
        // Only tried: another thread may have locked it at a fork.
        let Some(mut kept) = self.0.try_lock() else { return make() };
        let at = number as usize;
        if kept.len() <= at {
            kept.resize(at + 1, None);
        }
        *kept[at].get_or_insert_with(make)
    }
}

impl ExampleOrder {
    /// One permutation of all numbers.
    pub fn simple(how: PermutationKind, n: u64, key: Key) -> Result<ExampleOrder> {
        check(n)?;
        Ok(ExampleOrder { n, kind: OrderKind::Simple(Simple::new(how, n, key)) })
    }

    /// Levanter's block shuffle: blocks of `io` numbers, windows of `window` blocks.
    pub fn block(how: PermutationKind, n: u64, io: u64, window: u64, key: Key) -> Result<ExampleOrder> {
        check(n)?;
        if io == 0 || window == 0 || io.checked_mul(window).is_none() {
            return Err(Error::new(
                Kind::Argument,
                "expected blocks and windows of 1 or more, and a product below 2^64",
            ));
        }
        let (of_blocks, within, of_tail) = (split(key, 0), split(key, 1), split(key, 2));
        let full = n / io;
        let last = u32::try_from(full / window)
            .map_err(|_| Error::new(Kind::Argument, "expected at most 2^32 windows; use larger blocks"))?;
        let tail = Simple::new(how, n - full * io, fold_in(of_tail, last));
        let blocks = Simple::new(how, full, of_blocks);
        Ok(ExampleOrder {
            n,
            kind: OrderKind::Block(BlockShuffle {
                how,
                io,
                window,
                full,
                blocks,
                within,
                tail,
                kept: KeptPermutations::default(),
            }),
        })
    }

    /// The era shuffle of 2025: each era is shuffled, and eras follow each other.
    pub fn era(how: PermutationKind, n: u64, era: u64, key: Key) -> Result<ExampleOrder> {
        check(n)?;
        if era == 0 || n / era > u64::from(u32::MAX) {
            return Err(Error::new(Kind::Argument, "expected eras of 1 or more, and at most 2^32 of them"));
        }
        Ok(ExampleOrder { n, kind: OrderKind::Era { how, era, key, kept: KeptPermutations::default() } })
    }

    /// The number of elements.
    pub fn len(&self) -> u64 {
        self.n
    }

    /// Whether n is 0.
    pub fn is_empty(&self) -> bool {
        self.n == 0
    }

    /// The parameters of a simple permutation; empty for others.
    pub fn parameters(&self) -> Vec<u64> {
        match &self.kind {
            OrderKind::Simple(simple) => simple.parameters(),
            _ => vec![],
        }
    }

    fn at(&self, x: u64, last: &mut Option<(u64, Simple)>) -> u64 {
        let mut window_of = |number: u64, kept: &KeptPermutations, make: &dyn Fn() -> Simple| match last {
            Some((held, simple)) if *held == number => *simple,
            _ => last.insert((number, kept.get(number, make))).1,
        };
        match &self.kind {
            OrderKind::Simple(simple) => simple.at(x),
            OrderKind::Block(b) => {
                let tail = b.full * b.io;
                if x >= tail {
                    return tail + b.tail.at(x - tail);
                }
                let window = x / (b.io * b.window);
                let first = window * b.window;
                let held = (b.full - first).min(b.window) * b.io;
                let make = || Simple::new(b.how, held, fold_in(b.within, window as u32));
                let at = window_of(window, &b.kept, &make).at(x - first * b.io);
                b.blocks.at(first + at / b.io) * b.io + at % b.io
            }
            OrderKind::Era { how, era, key, kept } => {
                let number = x / era;
                let first = number * era;
                let make = || Simple::new(*how, (self.n - first).min(*era), fold_in(*key, number as u32));
                first + window_of(number, kept, &make).at(x - first)
            }
        }
    }

    /// Maps many positions to numbers.
    pub fn map(&self, numbers: &[i64], out: &mut [i64], watch: Watch<'_>) -> Result<()> {
        const PART: usize = 1 << 14;
        let one = |_: usize, (numbers, out): (&[i64], &mut [i64]), _: &threads::Stop| {
            if let OrderKind::Simple(simple) = &self.kind {
                return self.map_simple(simple, numbers, out);
            }
            let mut last = None;
            for (to, x) in out.iter_mut().zip(numbers.iter()) {
                *to = self.at(self.checked(*x)?, &mut last) as i64;
            }
            Ok(())
        };
        threads::for_each(numbers.chunks(PART).zip(out.chunks_mut(PART)), &one, watch)
    }

    fn map_simple(&self, simple: &Simple, numbers: &[i64], out: &mut [i64]) -> Result<()> {
        // Read each number once: another thread may write to the caller's memory between the check and the use.
        for (to, x) in out.iter_mut().zip(numbers) {
            *to = simple.at(self.checked(*x)?) as i64;
        }
        Ok(())
    }

    fn checked(&self, x: i64) -> Result<u64> {
        u64::try_from(x).ok().filter(|x| *x < self.n).ok_or_else(|| {
            Error::new(Kind::OutOfRange, format!("index {x} is out of range: the order has {} members", self.n))
        })
    }
}

fn check(n: u64) -> Result<()> {
    if n <= 1 << 62 {
        Ok(())
    } else {
        Err(Error::new(Kind::Argument, format!("expected a length up to 2^62, found {n}")))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_random_numbers_are_those_of_jax() {
        // From the paper's reference code, and for seed 0 from levanter.md's golden file.
        assert_eq!(threefry([0, 0], [0, 0]), [0x6b20_0159, 0x99ba_4efe]);
        assert_eq!(threefry([0x1319_8a2e, 0x0370_7344], [0x243f_6a88, 0x85a3_08d3]), [0xc492_3a9c, 0x483d_f7a0]);
        assert_eq!(split(key(0), 0), [1_797_259_609, 2_579_123_966]);
        assert_eq!(fold_in(key(0), 7), [2_716_826_189, 292_468_403]);
        assert_eq!(seed_of(key(0)), 31_327_077);
    }

    #[test]
    fn a_walk_ends_for_numbers_outside_the_order_too() {
        for n in 0..200 {
            for seed in 0..4 {
                for how in [PermutationKind::Feistel, PermutationKind::Linear] {
                    let order = Simple::new(how, n, key(seed));
                    for x in (n..n + 300).chain([1 << 40, u64::MAX]) {
                        let _ = order.at(x);
                    }
                }
            }
        }
    }

    proptest! {
        #[test]
        fn every_order_is_a_permutation(n in 0u64..500, seed: u32, io in 1u64..40, window in 1u64..6, linear: bool) {
            let how = if linear { PermutationKind::Linear } else { PermutationKind::Feistel };
            let key = key(u64::from(seed));
            for order in [
                ExampleOrder::simple(how, n, key).unwrap(),
                ExampleOrder::block(how, n, io, window, key).unwrap(),
                ExampleOrder::era(how, n, io, key).unwrap(),
            ] {
                let numbers: Vec<i64> = (0..n as i64).collect();
                let mut out = vec![0; numbers.len()];
                order.map(&numbers, &mut out, &mut || false).unwrap();
                out.sort_unstable();
                prop_assert_eq!(&out, &numbers);
                prop_assert!(order.map(&[n as i64], &mut [0], &mut || false).is_err());
                prop_assert!(order.map(&[-1], &mut [0], &mut || false).is_err());
            }
        }

        #[test]
        fn linear_orders_are_exact_for_any_length(n in (1u64 << 33)..(1 << 62), seed: u32, x: u64, y: u64) {
            let order = Simple::new(PermutationKind::Linear, n, key(u64::from(seed)));
            let (x, y) = (x % n, y % n);
            prop_assert!(order.at(x) < n);
            prop_assert_eq!(order.at(x) == order.at(y), x == y);
        }
    }
}
