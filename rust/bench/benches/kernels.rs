//! Times each kernel beside its oracle (the naive loop, compared for equality first) and the obvious alternative:
//! `cargo bench --manifest-path rust/bench/Cargo.toml`, 30 s. Records: benches/record/*-kernels.md.

#![allow(missing_docs, clippy::unwrap_used, reason = "a bench fails by panicking")]

use std::hint::black_box;
use std::io::{Read, Write};
use std::sync::Arc;
use std::time::Duration;

use actshard_core::DType;
use actshard_core::codec::inflate::inflate;
use actshard_core::dtype::Cast;
use actshard_core::files::scaled::{ScaledArray, ScaledStore};
use actshard_core::files::table::{FileTable, RowFile, RowsIn};
use actshard_core::gather::{Ints, Out, Pick};
use actshard_core::kernels::scaled::{self, Product, ScaledCode};
use actshard_core::kernels::{self, Float, Stores, portable};
use actshard_core::layout::Layout;
use actshard_core::layout::placed::Placed;
use actshard_core::layout::strided::Strided;
use actshard_core::layout::table::{Table, TableBuilder};
use actshard_core::location::Location;
use actshard_core::parse::arrays::ArrayPlace;
use actshard_core::parse::safetensors::parse_bytes;
use actshard_core::rows::Rows;
use actshard_core::source::local::Local;
use actshard_core::source::{Io, Store};
use actshard_core::stream::order::Permutation;
use actshard_core::stream::rescale::{Convert, Scale, Scratch};
use actshard_core::threads::{Context, Stop};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use half::{bf16, f16};

/// Rows of 768 float32.
const ROW: usize = 3072;
const WIDTH: usize = ROW / 4;

/// SplitMix64.
fn random(n: usize) -> Vec<u64> {
    let mut state = 0u64;
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 16
    };
    (0..n).map(|_| next()).collect()
}

fn values(n: usize) -> Vec<f32> {
    random(n).into_iter().map(|x| (x % 20_000) as f32 / 1e3 - 10.0).collect()
}

/// Random rows of 192 MiB into outputs below and above the size from which they are streamed.
fn copy(c: &mut Criterion) {
    let src: Vec<u8> = vec![1; 192 << 20];
    for mib in [1, 48] {
        let rows = (mib << 20) / ROW;
        let mut picks: Vec<usize> = random(rows).into_iter().map(|x| x as usize % (src.len() / ROW) * ROW).collect();
        picks.sort_unstable();
        let mut out = vec![0u8; rows * ROW];
        let mut group = c.benchmark_group(format!("copy, random rows of 3 KiB, {mib} MiB"));
        group.throughput(Throughput::Bytes(out.len() as u64));
        for (name, stream) in [("cached stores", false), ("streamed stores", true)] {
            group.bench_function(name, |b| {
                b.iter(|| {
                    kernels::storing(stream, |stores| {
                        for (to, from) in out.chunks_exact_mut(ROW).zip(&picks) {
                            kernels::copy(&src[*from..*from + ROW], to, stores);
                        }
                    });
                });
            });
        }
        group.bench_function("copy_from_slice", |b| {
            b.iter(|| {
                for (to, from) in out.chunks_exact_mut(ROW).zip(&picks) {
                    to.copy_from_slice(&src[*from..*from + ROW]);
                }
            });
        });
        let whole = src[..out.len()].to_vec();
        group.bench_function("one contiguous copy", |b| b.iter(|| black_box(&mut out).copy_from_slice(&whole)));
    }
}

/// 16,384 elements, in the cache.
fn cast(c: &mut Criterion) {
    const N: usize = 16_384;
    let types =
        [(Float::F16, DType::F16), (Float::BF16, DType::BF16), (Float::F32, DType::F32), (Float::F64, DType::F64)];
    let single = values(N);
    let bytes = |dtype: DType| {
        let cast = Cast::between(DType::F32, dtype).unwrap();
        let mut out = vec![0; N * cast.to_size];
        cast.apply(bytemuck::cast_slice(&single), &mut out);
        out
    };
    for ((from, source), (to, target)) in types.iter().flat_map(|f| types.iter().map(move |t| (*f, *t))) {
        if from == to {
            continue;
        }
        let (src, naive) = (bytes(source), naive(from, to));
        let size = target.size().unwrap();
        let (mut out, mut want) = (vec![0; N * size], vec![0; N * size]);
        let (best, plain) = (kernels::conversion(from, to).unwrap(), portable::conversion(from, to).unwrap());
        naive(&src, &mut want);
        let mut group = c.benchmark_group(format!("cast, {from:?} to {to:?}"));
        group.throughput(Throughput::Elements(N as u64));
        for (name, kernel) in [("best", best), ("portable", plain)] {
            kernel(&src, &mut out, Stores::Cached);
            assert!(out == want, "{from:?} to {to:?}");
            group.bench_function(name, |b| b.iter(|| kernel(black_box(&src), &mut out, Stores::Cached)));
        }
        group.bench_function("element by element", |b| b.iter(|| naive(black_box(&src), &mut out)));
    }
}

/// A conversion with `half`'s functions of single elements. (The values here need no rounding from float64.)
fn naive(from: Float, to: Float) -> impl Fn(&[u8], &mut [u8]) {
    let read = move |b: &[u8]| match from {
        Float::F16 => f16::from_le_bytes([b[0], b[1]]).to_f64(),
        Float::BF16 => bf16::from_le_bytes([b[0], b[1]]).to_f64(),
        Float::F32 => f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
        Float::F64 => f64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]),
    };
    let size = |float| match float {
        Float::F16 | Float::BF16 => 2,
        Float::F32 => 4,
        Float::F64 => 8,
    };
    move |src, dst| {
        for (s, d) in src.chunks_exact(size(from)).zip(dst.chunks_exact_mut(size(to))) {
            match to {
                Float::F16 => d.copy_from_slice(&f16::from_f64(read(s)).to_le_bytes()),
                Float::BF16 => d.copy_from_slice(&bf16::from_f64(read(s)).to_le_bytes()),
                Float::F32 => d.copy_from_slice(&(read(s) as f32).to_le_bytes()),
                Float::F64 => d.copy_from_slice(&read(s).to_le_bytes()),
            }
        }
    }
}

/// One row, centred and scaled.
fn scale(c: &mut Criterion) {
    let row = values(WIDTH);
    let (center, by): (Vec<f64>, Vec<f64>) = (vec![0.25; WIDTH], vec![1.5; WIDTH]);
    let convert = |scale| Convert::new(DType::F32, DType::F32, WIDTH, 1, center.clone(), scale).unwrap();
    let naive = |out: &mut [f32]| {
        for (i, o) in out.iter_mut().enumerate() {
            *o = (row[i] - center[i] as f32) * by[i] as f32;
        }
    };
    let (mut out, mut want, mut scratch) = (vec![0f32; WIDTH], vec![0f32; WIDTH], Scratch::default());
    let mut group = c.benchmark_group("scale, a row of 768 float32");
    group.throughput(Throughput::Elements(WIDTH as u64));
    naive(&mut want);
    for (name, convert) in [("by a vector", convert(Scale::By(by.clone()))), ("to a norm", convert(Scale::ToNorm(1.0)))]
    {
        let mut run = || {
            let dst = bytemuck::cast_slice_mut(&mut out);
            convert.row(0, bytemuck::cast_slice(&row), dst, &mut scratch, Stores::Cached);
        };
        run();
        group.bench_function(name, |b| b.iter(&mut run));
        assert!(name != "by a vector" || out == want);
    }
    group.bench_function("one loop with float64 vectors", |b| b.iter(|| naive(black_box(&mut out))));
}

const CODES: [(ScaledCode, DType, &str); 3] = [
    (ScaledCode::E4M3, DType::F8E4M3, "float8_e4m3fn"),
    (ScaledCode::E5M2, DType::F8E5M2, "float8_e5m2"),
    (ScaledCode::I8, DType::I8, "int8"),
];

/// Random bytes without those that are NaN or infinite in a float8 type.
fn codes(n: usize) -> Vec<u8> {
    random(n).into_iter().map(|x| x as u8 & 0xbf).collect()
}

/// Products in bfloat16 of a row of 4,096 codes, in the cache, beside a copy of as many bytes.
fn products(c: &mut Criterion) {
    const N: usize = 4096;
    let (src, plain) = (codes(N), vec![1u8; 2 * N]);
    let scales: Vec<u8> = values(N).into_iter().flat_map(f32::to_le_bytes).collect();
    let (mut out, mut want) = (vec![0u8; 2 * N], vec![0u8; 2 * N]);
    for (code, _, name) in CODES {
        let mut group = c.benchmark_group(format!("scaled, {name} to bfloat16"));
        group.throughput(Throughput::Bytes(out.len() as u64));
        scaled::portable_times(code, Product::BF16, &src, 0.37, &mut want);
        scaled::times(code, Product::BF16, &src, 0.37, &mut out, Stores::Cached);
        assert!(out == want, "{name}");
        group.bench_function("one scale", |b| {
            b.iter(|| scaled::times(code, Product::BF16, black_box(&src), 0.37, &mut out, Stores::Cached));
        });
        group.bench_function("one scale, portable", |b| {
            b.iter(|| scaled::portable_times(code, Product::BF16, black_box(&src), 0.37, &mut out));
        });
        scaled::portable_times_each(code, Product::BF16, &src, &scales, &mut want);
        scaled::times_each(code, Product::BF16, &src, &scales, &mut out, Stores::Cached);
        assert!(out == want, "{name}");
        group.bench_function("a scale each", |b| {
            b.iter(|| scaled::times_each(code, Product::BF16, black_box(&src), &scales, &mut out, Stores::Cached));
        });
        group.bench_function("copy", |b| b.iter(|| kernels::copy(black_box(&plain), &mut out, Stores::Cached)));
    }
}

/// 16,384 random rows of 4,096 elements out of 24,576, as bfloat16 by all threads: 128 MiB of output, from mapped files.
fn gather_products(c: &mut Criterion) {
    const ROWS: u64 = 24_576;
    const WIDTH: u64 = 4096;
    const ITEMS: usize = 16_384;
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        Location::from(path.as_path())
    };
    let tokens: Vec<i64> = random(ITEMS).into_iter().map(|x| (x % ROWS) as i64).collect();
    let rows = |store: Arc<dyn Store>, location: Location| {
        let file = RowFile { location, rows: RowsIn::Apart { step: 2 * WIDTH, swapped: false } };
        let layout = Placed::new(1, vec![0], vec![0], vec![ROWS as u32], vec![2 * WIDTH]).unwrap();
        Rows::Placed(FileTable::of(store, vec![file], WIDTH, DType::BF16).unwrap(), layout)
    };
    let mut out = vec![0u8; ITEMS * 2 * WIDTH as usize];
    let mut group = c.benchmark_group("gather, 128 MiB of rows of 4,096 bfloat16");
    group.throughput(Throughput::Bytes(out.len() as u64));
    let mut run = |name: &str, rows: &Rows| {
        let pick = || Pick::Tokens { examples: Ints::One(0), tokens: Ints::Each(&tokens) };
        let cast = Cast::between(DType::BF16, DType::BF16).unwrap();
        group.bench_function(name, |b| {
            b.iter(|| {
                rows.gather(Ints::One(0), pick(), ITEMS, cast, Out::Dense(&mut out), &mut || false).unwrap();
            });
        });
    };
    let plain = write("plain", &vec![1; (ROWS * WIDTH * 2) as usize]);
    run("stored as bfloat16", &rows(Arc::new(Local { io: Io::Mmap }), plain));
    let scales: Vec<u8> = (0..ROWS.max(WIDTH)).flat_map(|i| (0.1 + i as f32).to_le_bytes()).collect();
    let bytes = [scales.clone(), codes((ROWS * WIDTH) as usize)].concat();
    let file = write("codes", &bytes);
    let place = |dtype, shape: &[u64], at| {
        let (shape, strides) = (shape.to_vec(), ArrayPlace::dense(shape));
        ArrayPlace { dtype, swapped: false, shape, strides, at, inside: None, parts: None }
    };
    for (_, dtype, name) in CODES {
        for (per, shape) in [("a row", [ROWS, 1, 1]), ("a channel", [1, 1, WIDTH])] {
            let codes = place(dtype, &[ROWS, 1, WIDTH], scales.len() as u64);
            let array = ScaledArray::new(&codes, &place(DType::F32, &shape, 0), DType::BF16).unwrap();
            let store = ScaledStore::new(Arc::new(Local { io: Io::Mmap }), vec![(file.clone(), array)]);
            run(&format!("{name}, a scale for {per}"), &rows(Arc::new(store), ScaledStore::name(&file, 0)));
        }
    }
}

/// Addresses of 4,096 random rows.
fn locate(c: &mut Criterion) {
    const N: usize = 4096;
    let (examples, tokens) = (1_000_000u64, 64u64);
    let strided = Strided::new(examples, 10_000, 4, tokens).unwrap();
    let mut builder = TableBuilder::new(100);
    let shards: Vec<i64> = (0..examples as i64).map(|e| e / 10_000).collect();
    let rows: Vec<i64> = (0..examples as i64).map(|e| e % 10_000).collect();
    builder.push(&shards, &rows, None).unwrap();
    let table: Table = builder.finish(4).unwrap();
    let picks: Vec<(i64, i64)> =
        random(N).into_iter().map(|x| ((x % examples) as i64, (x >> 24) as i64 % tokens as i64)).collect();
    let arithmetic = |e: i64, t: i64| {
        let (file, e) = (e as u64 / 10_000, e as u64 % 10_000);
        (file, (e * 4 + 1) * tokens + t as u64)
    };
    let mut group = c.benchmark_group("locate, 4,096 random rows");
    group.throughput(Throughput::Elements(N as u64));
    for (e, t) in &picks {
        let at = strided.locate(1, *e, *t).unwrap();
        assert_eq!((at.file, at.row), arithmetic(*e, *t));
    }
    let sum = |each: &dyn Fn(i64, i64) -> u64| picks.iter().fold(0u64, |sum, (e, t)| sum.wrapping_add(each(*e, *t)));
    group.bench_function("strided", |b| b.iter(|| sum(&|e, t| strided.locate(1, e, t).unwrap().row)));
    group.bench_function("table", |b| b.iter(|| sum(&|e, _| table.last(1, e).unwrap().row)));
    group.bench_function("arithmetic without checks", |b| b.iter(|| sum(&|e, t| arithmetic(e, t).1)));
}

/// Entries of a part: whole, and in blocks of one megabyte of output.
fn sort(c: &mut Criterion) {
    let entries: Vec<(u64, u32, u32)> =
        random(2048).into_iter().enumerate().map(|(i, key)| (key % 1_000_000, i as u32, 1)).collect();
    let mut group = c.benchmark_group("sort, 2,048 entries");
    group.throughput(Throughput::Elements(entries.len() as u64));
    group.bench_function("unstable", |b| {
        b.iter_with_setup(|| entries.clone(), |mut e| e.sort_unstable_by_key(|e| e.0));
    });
    group.bench_function("stable", |b| b.iter_with_setup(|| entries.clone(), |mut e| e.sort_by_key(|e| e.0)));
    group.bench_function("in blocks of 341", |b| {
        b.iter_with_setup(
            || entries.clone(),
            |mut e| e.chunks_mut(341).for_each(|block| block.sort_unstable_by_key(|e| e.0)),
        );
    });
}

/// A gzip member of random float32.
fn inflate_gzip(c: &mut Criterion) {
    let plain: Vec<u8> = bytemuck::cast_slice(&values(1 << 20)).to_vec();
    let mut encoder = flate2::write::GzEncoder::new(vec![], flate2::Compression::new(1));
    encoder.write_all(&plain).unwrap();
    let gz = encoder.finish().unwrap();
    assert!(*inflate(&gz, 1 << 30, &mut Context::of_part(&Stop::new())).unwrap() == plain[..]);
    let mut group = c.benchmark_group("inflate, 4 MiB");
    group.throughput(Throughput::Bytes(plain.len() as u64));
    group.bench_function("ours (libdeflate)", |b| {
        b.iter(|| inflate(&gz, 1 << 30, &mut Context::of_part(&Stop::new())).unwrap())
    });
    group.bench_function("flate2 (zlib-rs)", |b| {
        b.iter(|| {
            let mut out = Vec::with_capacity(plain.len());
            flate2::read::GzDecoder::new(&gz[..]).read_to_end(&mut out).unwrap();
            out
        });
    });
}

/// A safetensors header of 1,000 tensors.
fn parse(c: &mut Criterion) {
    let tensors: Vec<String> = (0..1000)
        .map(|i| {
            format!(r#""hidden.layer_{i}":{{"dtype":"U8","shape":[1,8],"data_offsets":[{},{}]}}"#, i * 8, i * 8 + 8)
        })
        .collect();
    let header = format!("{{{}}}", tensors.join(","));
    let header = header.clone() + &" ".repeat(header.len().next_multiple_of(8) - header.len());
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.resize(file.len() + 8000, 0);
    assert!(parse_bytes(&file).unwrap().tensor("hidden.layer_999").is_some());
    let mut group = c.benchmark_group("parse, a header of 1,000 tensors");
    group.throughput(Throughput::Bytes(header.len() as u64));
    group.bench_function("ours, all checks", |b| b.iter(|| parse_bytes(&file).unwrap()));
    group.bench_function("serde_json::Value, no checks", |b| {
        b.iter(|| serde_json::from_str::<serde_json::Value>(&header).unwrap());
    });
}

/// 4,096 positions of an order.
fn permute(c: &mut Criterion) {
    let mut group = c.benchmark_group("permute, 4,096 positions");
    group.throughput(Throughput::Elements(4096));
    for (name, n) in [("table of 65,536", 1u64 << 16), ("cipher over a million", 1_000_000)] {
        let order = Permutation::shuffled(n, 7);
        assert!((0..1000).all(|i| order.position(order.get(i)) == i));
        group.bench_function(name, |b| {
            b.iter(|| (0..4096).fold(0u64, |sum, i| sum.wrapping_add(order.get(black_box(i)))));
        });
        let mut numbers = vec![0; 4096];
        group.bench_function(format!("{name}, filled"), |b| {
            b.iter(|| order.fill(black_box(0), black_box(&mut numbers)));
        });
    }
    let picks: Vec<usize> = random(1_000_000).into_iter().map(|x| x as usize).collect();
    group.bench_function("Fisher-Yates over a million, its share", |b| {
        let mut all: Vec<u64> = (0..1_000_000).collect();
        let mut from = all.len();
        b.iter(|| {
            for _ in 0..4096 {
                from = if from < 2 { all.len() } else { from };
                all.swap(from - 1, picks[from - 1] % from);
                from -= 1;
            }
        });
    });
}

fn quick() -> Criterion {
    Criterion::default()
        .sample_size(11)
        .warm_up_time(Duration::from_millis(50))
        .measurement_time(Duration::from_millis(250))
        .without_plots()
}

criterion_group! {
    name = benches;
    config = quick();
    targets = copy, cast, scale, products, gather_products, locate, sort, inflate_gzip, parse, permute
}
criterion_main!(benches);
