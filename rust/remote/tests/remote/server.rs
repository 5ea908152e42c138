//! A server for the tests: S3 with listings, a hub with a second host, and plain files, with faults by script.

#![allow(clippy::unwrap_used, clippy::panic, dead_code, reason = "a test fails by panicking; no test uses all of it")]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use actshard_core::Result;
use actshard_core::location::Location;
use actshard_core::source::{Access, Source, Store};
use actshard_core::threads::Stop;
use actshard_remote::store::Standing;
use actshard_remote::{Options, RemoteStore};

/// The commit of the hub's dataset, and its token.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
pub const TOKEN: &str = "hf_secret_token";

#[derive(Clone, Debug)]
pub enum Fault {
    /// A status with headers and a body.
    Status(u16, Vec<(&'static str, String)>, &'static str),
    /// The connection closes without an answer.
    Reset,
    /// The connection closes after so many bytes of the body.
    Cut(usize),
    /// The answer comes this much later.
    Late(Duration),
    /// The rest of the body comes this much later.
    Stall(usize, Duration),
    /// The rest of the body comes when the flag is set.
    Held(usize, Arc<AtomicBool>),
    /// After so many bytes of the body, the others come one by one, so long apart.
    Drip(usize, Duration),
    /// A header with this value is added.
    Header(&'static str, &'static str),
    /// The range is ignored: 200 and everything.
    Whole,
    /// The answer is of another range.
    Elsewhere,
    /// No ETag and no time.
    Untagged,
}

pub fn status(code: u16) -> Fault {
    Fault::Status(code, vec![], "")
}

#[derive(Clone, Debug)]
pub struct Seen {
    pub method: String,
    pub path: String,
    pub query: String,
    pub headers: BTreeMap<String, String>,
    /// Whether it came to the second host.
    pub away: bool,
}

#[derive(Default)]
struct State {
    objects: BTreeMap<String, Vec<u8>>,
    /// Added to ETags: a change that keeps the size.
    versions: BTreeMap<String, u64>,
    /// Faults for paths that contain a text, each for so many requests.
    faults: Vec<(String, Fault, usize)>,
    seen: Vec<Seen>,
    /// Signed URLs with a lower number have ended.
    signed: u64,
    valid_from: u64,
    /// Listings have no ETags.
    bare_listings: bool,
    /// `If-Match` is ignored.
    ignores_match: bool,
    page: usize,
    /// The server's clock in seconds of an hour; without it, answers have no date and objects are old.
    now: Option<u64>,
    /// When objects were written, by that clock.
    written: BTreeMap<String, u64>,
}

/// The server. It ends with the process.
pub struct Fake {
    state: Arc<Mutex<State>>,
    pub port: u16,
    pub away: u16,
}

impl Fake {
    pub fn new(objects: impl IntoIterator<Item = (&'static str, Vec<u8>)>) -> Fake {
        let objects = objects.into_iter().map(|(key, bytes)| (key.to_string(), bytes)).collect();
        let state = Arc::new(Mutex::new(State { objects, page: 1000, ..State::default() }));
        let (home, away) = (TcpListener::bind("127.0.0.1:0").unwrap(), TcpListener::bind("127.0.0.1:0").unwrap());
        let (port, away_port) = (home.local_addr().unwrap().port(), away.local_addr().unwrap().port());
        for (listener, is_away) in [(home, false), (away, true)] {
            let state = Arc::clone(&state);
            std::thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let state = Arc::clone(&state);
                    std::thread::spawn(move || {
                        stream.set_nodelay(true).unwrap();
                        let mut reader = BufReader::new(stream.try_clone().unwrap());
                        while serve(&state, &mut reader, &stream, is_away, away_port).is_some() {}
                        let _ = stream.shutdown(std::net::Shutdown::Both);
                    });
                }
            });
        }
        Fake { state, port, away: away_port }
    }

    /// The next so many requests whose path and query contain a text get a fault.
    pub fn fault(&self, text: &str, fault: Fault, times: usize) {
        self.state.lock().unwrap().faults.push((text.to_string(), fault, times));
    }

    pub fn put(&self, key: &str, bytes: Vec<u8>) {
        let mut state = self.state.lock().unwrap();
        *state.versions.entry(key.to_string()).or_default() += 1;
        if let Some(now) = state.now {
            state.written.insert(key.to_string(), now);
        }
        state.objects.insert(key.to_string(), bytes);
    }

    pub fn remove(&self, key: &str) {
        self.state.lock().unwrap().objects.remove(key);
    }

    /// Ends all signed URLs.
    pub fn expire(&self) {
        let mut state = self.state.lock().unwrap();
        state.valid_from = state.signed + 1;
    }

    pub fn set_page(&self, page: usize) {
        self.state.lock().unwrap().page = page;
    }

    pub fn set_bare_listings(&self) {
        self.state.lock().unwrap().bare_listings = true;
    }

    pub fn set_clock(&self, now: u64) {
        self.state.lock().unwrap().now = Some(now);
    }

    /// Sets the time of an object.
    pub fn set_written(&self, key: &str, at: u64) {
        self.state.lock().unwrap().written.insert(key.to_string(), at);
    }

    pub fn ignore_match(&self) {
        self.state.lock().unwrap().ignores_match = true;
    }

    /// Requests since the last call.
    pub fn seen(&self) -> Vec<Seen> {
        std::mem::take(&mut self.state.lock().unwrap().seen)
    }

    /// A store of `s3://bucket/KEY` on this server.
    pub fn s3(&self, key: &str, options: &[(&str, &str)]) -> RemoteStore {
        let endpoint = format!("http://127.0.0.1:{}", self.port);
        let mut pairs =
            vec![("endpoint", endpoint.as_str()), ("key", "id"), ("secret", "swordfish"), ("region", "us-east-1")];
        pairs.extend_from_slice(options);
        RemoteStore::open(&format!("s3://bucket/{key}"), steady(&pairs)).unwrap()
    }

    pub fn web(&self, path: &str, options: &[(&str, &str)]) -> RemoteStore {
        RemoteStore::open(&format!("http://127.0.0.1:{}/web/{path}", self.port), steady(options)).unwrap()
    }

    pub fn hub(&self, rest: &str, options: &[(&str, &str)]) -> RemoteStore {
        let endpoint = format!("http://127.0.0.1:{}", self.port);
        let mut pairs = vec![("endpoint", endpoint.as_str()), ("token", TOKEN)];
        pairs.extend_from_slice(options);
        RemoteStore::open(&format!("hf://datasets/lab/acts{rest}"), steady(&pairs)).unwrap()
    }
}

/// Options under which no request is sent twice because a busy machine answers late, unless they say so.
fn steady(pairs: &[(&str, &str)]) -> Options {
    options_of(&[&[("hedge", "false")], pairs].concat())
}

pub fn options_of(pairs: &[(&str, &str)]) -> Options {
    Options::new(pairs.iter().map(|(key, value)| ((*key).to_string(), (*value).to_string())))
}

/// Bytes that differ everywhere.
pub fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let next = |_| {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x as u8
    };
    (0..len).map(next).collect()
}

pub fn open(store: &RemoteStore, location: &Location) -> Result<Box<dyn Source>> {
    store.open_many(&[location], Access::Kept, &Stop::new()).pop().unwrap()
}

/// The size of an object, `Some(None)` for a folder.
pub fn stat(store: &RemoteStore, location: &Location) -> Option<Option<u64>> {
    match store.stat(location, &Stop::new()).unwrap() {
        Standing::Object(size) => Some(Some(size)),
        Standing::Folder => Some(None),
        Standing::Absent => None,
        Standing::Denied(error) => panic!("{error}"),
    }
}

pub fn read(source: &dyn Source, at: u64, len: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    source.read(at, &mut bytes, &Stop::new())?;
    Ok(bytes)
}

fn time(second: u64) -> String {
    format!("Sun, 22 Nov 2026 10:{:02}:{:02} GMT", second / 60, second % 60)
}

fn etag(state: &State, key: &str) -> String {
    let version = state.versions.get(key).copied().unwrap_or(0);
    format!("{:x}-{version}", state.objects[key].len() + key.len() * 7919)
}

/// Answers one request; `None` closes the connection.
fn serve(
    state: &Mutex<State>,
    reader: &mut BufReader<TcpStream>,
    mut to: &TcpStream,
    away: bool,
    away_port: u16,
) -> Option<()> {
    let mut line = String::new();
    reader.read_line(&mut line).ok().filter(|n| *n > 0)?;
    let mut words = line.split_whitespace();
    let (method, target) = (words.next()?.to_string(), words.next()?.to_string());
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((key, value)) = line.trim().split_once(':') else { break };
        headers.insert(key.to_ascii_lowercase(), value.trim().to_string());
    }
    let (path, query) = target.split_once('?').unwrap_or((&target, ""));
    let path = percent_decode(path);
    let (answer, fault) = {
        let mut state = state.lock().unwrap();
        let full = format!("{path}?{query}");
        state.seen.push(Seen {
            method: method.clone(),
            path: path.clone(),
            query: query.to_string(),
            headers: headers.clone(),
            away,
        });
        let found = state.faults.iter_mut().find(|(text, _, times)| *times > 0 && full.contains(text.as_str()));
        let fault = found.map(|(_, fault, times)| {
            *times -= 1;
            fault.clone()
        });
        let mut made = answer(&mut state, &path, query, &headers, away, away_port, fault.as_ref());
        made.headers.extend(state.now.map(|now| ("Date".to_string(), time(now))));
        (made, fault)
    };
    let Reply { mut status, mut headers, mut body } = answer;
    match &fault {
        Some(Fault::Status(code, extra, text)) => {
            (status, body) = (*code, text.as_bytes().to_vec());
            headers = extra.iter().map(|(key, value)| ((*key).to_string(), value.clone())).collect();
        }
        Some(Fault::Reset) => return None,
        Some(Fault::Late(time)) => std::thread::sleep(*time),
        Some(Fault::Header(key, value)) => headers.push(((*key).to_string(), (*value).to_string())),
        Some(Fault::Untagged) => headers.retain(|(key, _)| key != "ETag" && key != "Last-Modified"),
        _ => {}
    }
    let mut head = format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\n", body.len());
    for (key, value) in headers {
        write!(head, "{key}: {value}\r\n").unwrap();
    }
    head.push_str("\r\n");
    to.write_all(head.as_bytes()).ok()?;
    match fault {
        Some(Fault::Cut(at)) => {
            to.write_all(&body[..at.min(body.len())]).ok()?;
            return None;
        }
        Some(Fault::Stall(at, time)) => {
            let at = at.min(body.len());
            to.write_all(&body[..at]).ok()?;
            std::thread::sleep(time);
            to.write_all(&body[at..]).ok()?;
        }
        Some(Fault::Held(at, is_free)) => {
            let at = at.min(body.len());
            to.write_all(&body[..at]).ok()?;
            while !is_free.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(1));
            }
            to.write_all(&body[at..]).ok()?;
        }
        Some(Fault::Drip(at, pause)) => {
            let (first, rest) = body.split_at(at.min(body.len()));
            to.write_all(first).ok()?;
            for byte in rest {
                to.write_all(&[*byte]).ok()?;
                std::thread::sleep(pause);
            }
        }
        _ => to.write_all(&body).ok()?,
    }
    Some(())
}

struct Reply {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

fn plain(status: u16, body: String) -> Reply {
    Reply { status, headers: vec![], body: body.into_bytes() }
}

fn hub_error(status: u16, code: &str) -> Reply {
    let headers =
        vec![("X-Error-Code".to_string(), code.to_string()), ("X-Error-Message".to_string(), format!("{code}!"))];
    Reply { status, headers, body: vec![] }
}

fn answer(
    state: &mut State,
    path: &str,
    query: &str,
    headers: &BTreeMap<String, String>,
    away: bool,
    away_port: u16,
    fault: Option<&Fault>,
) -> Reply {
    if away {
        let number: u64 = query.split('&').find_map(|p| p.strip_prefix("sig=")?.parse().ok()).unwrap_or(0);
        if headers.contains_key("authorization") {
            return plain(400, "only one auth mechanism allowed".to_string());
        }
        if number < state.valid_from {
            return plain(
                403,
                "<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>".to_string(),
            );
        }
        let key = path.strip_prefix("/cdn/").unwrap_or_default().to_string();
        return file(state, &key, headers, fault, "cdn-");
    }
    if let Some(rest) = path.strip_prefix("/bucket") {
        let key = rest.trim_start_matches('/').to_string();
        if key.is_empty() && query.contains("list-type=2") {
            return list(state, query);
        }
        return match state.objects.contains_key(&key) {
            true => file(state, &key, headers, fault, ""),
            false => {
                plain(404, "<Error><Code>NoSuchKey</Code><Message>The key does not exist</Message></Error>".to_string())
            }
        };
    }
    if let Some(key) = path.strip_prefix("/web/") {
        return match state.objects.contains_key(key) {
            true => file(state, key, headers, fault, ""),
            false => plain(404, "<html>nothing</html>".to_string()),
        };
    }
    hub(state, path, query, headers, away_port)
}

fn hub(state: &mut State, path: &str, query: &str, headers: &BTreeMap<String, String>, away_port: u16) -> Reply {
    if headers.get("authorization").map(String::as_str) != Some(&format!("Bearer {TOKEN}")) {
        return hub_error(401, "RepoNotFound");
    }
    if let Some(revision) = path.strip_prefix("/api/datasets/lab/acts/revision/") {
        return match revision {
            "main" | COMMIT => plain(200, format!("{{\"sha\": \"{COMMIT}\", \"private\": true}}")),
            _ => hub_error(404, "RevisionNotFound"),
        };
    }
    if let Some(rest) = path.strip_prefix(&format!("/api/datasets/lab/acts/tree/{COMMIT}")) {
        let folder = rest.trim_start_matches('/').to_string();
        let start: usize = query.split('&').find_map(|p| p.strip_prefix("cursor=")?.parse().ok()).unwrap_or(0);
        let below = if folder.is_empty() { String::new() } else { format!("{folder}/") };
        let keys: Vec<String> = state.objects.keys().filter(|key| key.starts_with(&below)).cloned().collect();
        if keys.is_empty() {
            return hub_error(404, "EntryNotFound");
        }
        let entry = |key: &String| {
            let (tag, size) = (etag(state, key), state.objects[key].len());
            format!(
                "{{\"type\": \"file\", \"path\": {key:?}, \"size\": {size}, \"oid\": \"x\", \"lfs\": {{\"oid\": \"{tag}\", \"size\": {size}, \"pointerSize\": 1}}}}"
            )
        };
        let page: Vec<String> = keys.iter().skip(start).take(state.page).map(entry).collect();
        let mut reply = plain(200, format!("[{}]", page.join(", ")));
        if start + page.len() < keys.len() {
            let next = format!("<{path}?recursive=true&cursor={}>; rel=\"next\"", start + page.len());
            reply.headers.push(("Link".to_string(), next));
        }
        return reply;
    }
    let Some(key) = path.strip_prefix(&format!("/datasets/lab/acts/resolve/{COMMIT}/")) else {
        return hub_error(404, "RepoNotFound");
    };
    if !state.objects.contains_key(key) {
        return hub_error(404, "EntryNotFound");
    }
    state.signed += 1;
    let location = format!("http://127.0.0.1:{away_port}/cdn/{key}?sig={}&X-Amz-Expires=3600", state.signed);
    let headers =
        vec![("Location".to_string(), location), ("X-Linked-Etag".to_string(), format!("\"{}\"", etag(state, key)))];
    Reply { status: 302, headers, body: vec![] }
}

fn file(state: &State, key: &str, headers: &BTreeMap<String, String>, fault: Option<&Fault>, prefix: &str) -> Reply {
    let (bytes, tag) = (&state.objects[key], format!("\"{prefix}{}\"", etag(state, key)));
    let written = state.written.get(key).map_or("Sun, 06 Nov 2022 08:49:37 GMT".to_string(), |at| time(*at));
    let mut made = vec![("ETag".to_string(), tag.clone()), ("Last-Modified".to_string(), written)];
    if headers.get("if-match").is_some_and(|wanted| *wanted != tag) && !state.ignores_match {
        return plain(412, "<Error><Code>PreconditionFailed</Code><Message>no</Message></Error>".to_string());
    }
    let range = headers.get("range").and_then(|range| {
        let (first, last) = range.strip_prefix("bytes=")?.split_once('-')?;
        Some((first.parse::<usize>().ok()?, last.parse::<usize>().ok()?))
    });
    match (range, fault) {
        (None, _) | (_, Some(Fault::Whole)) => Reply { status: 200, headers: made, body: bytes.clone() },
        (Some((first, _)), _) if first >= bytes.len() => {
            made.push(("Content-Range".to_string(), format!("bytes */{}", bytes.len())));
            Reply { status: 416, headers: made, body: vec![] }
        }
        (Some((first, last)), _) => {
            let shift = usize::from(matches!(fault, Some(Fault::Elsewhere)));
            let (first, end) = (first + shift, (last + 1 + shift).min(bytes.len()));
            made.push(("Content-Range".to_string(), format!("bytes {first}-{}/{}", end - 1, bytes.len())));
            Reply { status: 206, headers: made, body: bytes[first..end].to_vec() }
        }
    }
}

/// ListObjectsV2 with a delimiter and pages.
fn list(state: &State, query: &str) -> Reply {
    let part = |name: &str| query.split('&').find_map(|p| p.strip_prefix(name)).map(percent_decode).unwrap_or_default();
    let (prefix, delimiter, token) = (part("prefix="), part("delimiter="), part("continuation-token="));
    let mut entries: BTreeMap<String, bool> = BTreeMap::new();
    let mut folders = BTreeSet::new();
    for key in state.objects.keys().filter(|key| key.starts_with(&prefix)) {
        match key[prefix.len()..].split_once('/') {
            Some((name, _)) if !delimiter.is_empty() => {
                let folder = format!("{prefix}{name}/");
                folders.insert(folder.clone());
                entries.insert(folder, true);
            }
            _ => {
                entries.insert(key.clone(), false);
            }
        }
    }
    let page: Vec<(&String, &bool)> = entries.iter().filter(|(key, _)| **key > token).take(state.page).collect();
    let more = page.last().is_some_and(|(last, _)| entries.keys().any(|key| key > *last));
    let mut xml = format!("<?xml version=\"1.0\"?><ListBucketResult><IsTruncated>{more}</IsTruncated>");
    for (key, is_folder) in &page {
        if **is_folder {
            write!(xml, "<CommonPrefixes><Prefix>{key}</Prefix></CommonPrefixes>").unwrap();
        } else {
            let tag = match state.bare_listings {
                true => String::new(),
                false => format!("<ETag>&quot;{}&quot;</ETag>", etag(state, key)),
            };
            let size = state.objects[*key].len();
            let written = match state.written.get(*key) {
                Some(at) => format!("2026-11-22T10:{:02}:{:02}.000Z", at / 60, at % 60),
                None => "2022-11-06T08:49:37.000Z".to_string(),
            };
            write!(
                xml,
                "<Contents><Key>{key}</Key><LastModified>{written}</LastModified>{tag}<Size>{size}</Size></Contents>"
            )
            .unwrap();
        }
    }
    if more {
        write!(xml, "<NextContinuationToken>{}</NextContinuationToken>", page.last().unwrap().0).unwrap();
    }
    xml.push_str("</ListBucketResult>");
    plain(200, xml)
}

fn percent_decode(text: &str) -> String {
    let mut made = vec![];
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        match byte {
            b'%' => {
                let hex: Vec<u8> = bytes.by_ref().take(2).collect();
                made.push(u8::from_str_radix(std::str::from_utf8(&hex).unwrap(), 16).unwrap());
            }
            b'+' => made.push(b' '),
            byte => made.push(byte),
        }
    }
    String::from_utf8(made).unwrap()
}
