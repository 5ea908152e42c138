//! The memory that this process may use, page cache included.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of memory of the machine, or of this process's control group if that has less; `u64::MAX` if neither is known.
pub fn memory_limit() -> u64 {
    // Not a OnceLock: a child forked while another thread looks would wait for that thread. Looking twice is harmless.
    static LIMIT: AtomicU64 = AtomicU64::new(0);
    match LIMIT.load(Ordering::Relaxed) {
        0 => {
            let limit = found(Path::new("/"));
            LIMIT.store(limit, Ordering::Relaxed);
            limit
        }
        limit => limit,
    }
}

/// The smallest limit below a root folder: `/proc/meminfo`, and the control group's and its parents' limits (cgroups v2, v1).
fn found(root: &Path) -> u64 {
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap_or_default();
    let mut least = u64::MAX;
    let meminfo = read("proc/meminfo");
    let total =
        meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB")?.parse().ok());
    if let Some(kib) = total.filter(|kib: &u64| *kib > 0) {
        least = kib.saturating_mul(1024);
    }
    // "hierarchy:controllers:path"; the path of v2 has no controllers.
    for line in read("proc/self/cgroup").lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (folder, file) = match controllers {
            "" => ("sys/fs/cgroup", "memory.max"),
            "memory" => ("sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            _ => continue,
        };
        // In a container the path may be the host's: then only the root's file exists.
        for group in Path::new(path.trim_start_matches('/')).ancestors() {
            let limit = read(&format!("{folder}/{}/{file}", group.display()));
            least = least.min(limit.trim().parse().unwrap_or(u64::MAX));
        }
    }
    least
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_limit_counts() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        assert_eq!(found(root.path()), u64::MAX);
        write("proc/meminfo", "MemTotal:       24000000 kB\nMemFree: 1 kB\n");
        assert_eq!(found(root.path()), 24_000_000 * 1024);
        write("proc/self/cgroup", "0::/jobs/one\n");
        write("sys/fs/cgroup/jobs/memory.max", "5000000000\n");
        write("sys/fs/cgroup/jobs/one/memory.max", "max\n");
        assert_eq!(found(root.path()), 5_000_000_000);
        write("proc/self/cgroup", "9:memory:/elsewhere\n3:cpu:/\n");
        write("sys/fs/cgroup/memory/memory.limit_in_bytes", "4000000000\n");
        assert_eq!(found(root.path()), 4_000_000_000);
        assert!(memory_limit() > 0);
    }
}
