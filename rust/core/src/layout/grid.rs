//! A regular grid of chunks over a 4-D array `(examples, groups, tokens, width)`.

/// The numbers of an array's chunks, among the chunks of all arrays.
#[derive(Clone, Copy, Debug)]
pub struct Grid {
    first: u64,
    shape: [u64; 4],
    chunk: [u64; 4],
    counts: [u64; 4],
}

impl Grid {
    /// A grid whose first chunk has the number `first`; `None` if chunks are empty.
    pub fn new(first: u64, shape: [u64; 4], chunk: [u64; 4]) -> Option<Grid> {
        if chunk.contains(&0) {
            return None;
        }
        let mut counts = [0; 4];
        for ((count, n), c) in counts.iter_mut().zip(shape).zip(chunk) {
            *count = n.div_ceil(c);
        }
        Some(Grid { first, shape, chunk, counts })
    }

    /// Number of chunks.
    pub fn chunks(&self) -> Option<u64> {
        self.counts.iter().try_fold(1u64, |n, c| n.checked_mul(*c))
    }

    /// The number of a row's first chunk (a split row continues in the following chunks), and the row's index inside.
    #[inline]
    pub fn locate(&self, example: u64, group: u64, token: u64) -> (u64, u64) {
        let [cn, cl, ct, _] = self.chunk;
        let [_, gl, gt, gh] = self.counts;
        let file = (((example / cn) * gl + group / cl) * gt + token / ct) * gh;
        let row = ((example % cn) * cl + group % cl) * ct + token % ct;
        (self.first + file, row)
    }

    /// Number of its first chunk.
    pub fn first(&self) -> u64 {
        self.first
    }

    /// The shape of every chunk.
    pub fn chunk(&self) -> [u64; 4] {
        self.chunk
    }

    /// Number of chunks over which a row is split.
    #[inline]
    pub fn split(&self) -> u64 {
        self.counts[3]
    }

    /// The array's shape.
    pub fn shape(&self) -> [u64; 4] {
        self.shape
    }

    /// Tokens per chunk.
    pub fn tokens_per_chunk(&self) -> u64 {
        self.chunk[2]
    }

    /// Examples per chunk.
    pub fn examples_per_chunk(&self) -> u64 {
        self.chunk[0]
    }

    /// Indices of a chunk.
    pub fn indices(&self, file: u64) -> [u64; 4] {
        let [_, gl, gt, gh] = self.counts;
        let n = file - self.first;
        [n / gh / gt / gl, n / gh / gt % gl, n / gh % gt, n % gh]
    }
}
