//! Reads ranges of one object into memory: slow requests are sent twice, broken bodies continue at the byte where they
//! broke, and every answer must belong to the object that was opened.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use actshard_core::Error;
use actshard_core::location::Location;
use actshard_core::threads::Renewed;
use futures_util::StreamExt;
use futures_util::future::{BoxFuture, Either, FutureExt, select};
use tokio::time::{sleep, timeout};

use crate::client::pace::Pace;
use crate::client::times::ServerDate;
use crate::client::{Answer, Client, Expected, checked, wire};
use crate::clock::Clock;
use crate::failure::{Cause, Failure};
use crate::known::{Known, ObjectFacts};
use crate::options::RequestLimits;
use crate::runtime::reserve;

/// Bytes after which a broken body counts as progress.
const PROGRESS: usize = 64 << 10;
/// The shortest wait for more of a body before another request is made.
const PAUSE: Duration = Duration::from_secs(1);

/// One object, and the means to request it.
#[derive(Clone, Copy)]
pub struct Reading<'a> {
    /// The protocol.
    pub client: &'a dyn Client,
    /// Measurements of the server.
    pub pace: &'a Pace,
    /// Limits of requests.
    pub limits: &'a RequestLimits,
    /// The object's key.
    pub key: &'a str,
    /// The object as it was opened; `None` before.
    pub opened: Option<&'a ObjectFacts>,
    /// The store's known facts: each answer is compared with them, so that two readers do not see two versions.
    pub known: &'a Renewed<Known>,
}

/// The first bytes of an object, and the facts in their answer.
pub struct Beginning {
    /// The bytes.
    pub bytes: Vec<u8>,
    /// The object's size and tag.
    pub facts: ObjectFacts,
    /// When the server answered.
    pub date: Option<ServerDate>,
}

impl<'a> Reading<'a> {
    fn expected(&self) -> Result<Expected, Failure> {
        let Some(opened) = self.opened else { return Ok(Expected::default()) };
        Ok(self.known.with(|known| known.latest(self.key, opened)).expected())
    }

    /// One answer, checked against the known facts about the object and the earlier answers.
    async fn ask(self, range: Range<u64>) -> Result<Answer, Failure> {
        let expected = self.expected()?;
        let end = Instant::now() + self.limits.patience;
        let answer = wire::until(end, checked(self.client, self.key, range, &expected)).await?;
        if let Some(opened) = self.opened {
            let found = answer.facts();
            let same = self.known.with(|known| known.again(self.key, opened, &found));
            same.map_err(Failure::changed)?;
        }
        Ok(answer)
    }

    /// Whether a slow request is sent again.
    fn may_hedge(&self) -> bool {
        self.limits.hedge && self.pace.may_hedge()
    }

    /// The first answer; of two, if one is slow.
    async fn first(self, range: Range<u64>) -> Result<Answer, Failure> {
        let mut one = self.ask(range.clone()).boxed();
        if let Ok(answer) = timeout(self.pace.patience(), &mut one).await {
            return answer;
        }
        if !self.may_hedge() {
            return one.await;
        }
        match select(one, self.ask(range).boxed()).await {
            Either::Left((Err(failure), other)) | Either::Right((Err(failure), other)) if failure.is_temporary() => {
                other.await
            }
            Either::Left((answer, _)) | Either::Right((answer, _)) => answer,
        }
    }

    /// Fills memory with the bytes from an offset.
    pub async fn fill(self, at: u64, into: &mut Pieces<'_>) -> Result<(), Failure> {
        let _permit = reserve(into.left() as u64).await;
        let (mut broken, mut clock, mut progress) = (0, Clock::default(), Progress::default());
        while into.left() > 0 {
            let before = into.done;
            let answer = clock.watch(self.first(at + into.done as u64..at + into.len as u64)).await?;
            let long = self.pace.fly(into.left() as u64);
            let Err(failure) = self.body(answer, at, into, &mut clock, &mut progress).await else { break };
            drop(long);
            if into.done - before >= PROGRESS {
                broken = 0;
            }
            broken += 1;
            self.may_go_on(failure, broken, progress.is_late(into.done, &clock, self.limits.patience))?;
            clock.watch(sleep(self.pace.backoff(broken - 1))).await;
        }
        Ok(())
    }

    /// Fails unless another request may help.
    fn may_go_on(&self, failure: Failure, broken: u32, is_late: bool) -> Result<(), Failure> {
        let tired = broken >= self.limits.tries || is_late;
        if failure.is_temporary() && !tired { Ok(()) } else { Err(failure) }
    }

    /// Copies a body to its place. Another request takes over if nothing arrives for a while; a body that arrives too slowly
    /// fails.
    async fn body(
        self,
        mut answer: Answer,
        at: u64,
        into: &mut Pieces<'_>,
        clock: &mut Clock,
        progress: &mut Progress,
    ) -> Result<(), Failure> {
        let mut other: Option<BoxFuture<'a, Result<Answer, Failure>>> = None;
        let (end, patience) = (at + into.len as u64, self.limits.patience);
        let mut own = Progress::since(into.done, clock);
        while into.left() > 0 {
            let chunk = match other.take() {
                None => match clock.watch(timeout(self.pace.patience().max(PAUSE), answer.body.next())).await {
                    Ok(chunk) => chunk,
                    Err(_) => {
                        other = self.may_hedge().then(|| self.ask(at + into.done as u64..end).boxed());
                        continue;
                    }
                },
                Some(waiting) => match clock.watch(select(answer.body.next(), waiting)).await {
                    Either::Left((chunk, _)) => chunk,
                    Either::Right((Ok(newer), _)) => {
                        (answer, own) = (newer, Progress::since(into.done, clock));
                        continue;
                    }
                    Either::Right((Err(failure), _)) if failure.is_temporary() => continue,
                    Either::Right((Err(failure), _)) => return Err(failure),
                },
            };
            let chunk = chunk.ok_or_else(|| Failure::new(Cause::Broken, "the answer ended early"))??;
            self.pace.received(chunk.len() as u64);
            into.put(&chunk);
            // Each byte resets the limits of waits: a server that sends few of them would never end.
            if into.left() > 0
                && (own.is_late(into.done, clock, patience / 2) | progress.is_late(into.done, clock, patience))
            {
                let text = format!("the answer is too slow: less than 64 KiB in {} s", patience.as_secs_f64() / 2.0);
                return Err(Failure::new(Cause::Broken, text));
            }
        }
        Ok(())
    }

    /// Requests one byte of a known object: fails unless the object still exists unchanged.
    pub async fn still(self) -> Result<(), Failure> {
        match self.opened.map(|opened| opened.size) {
            Some(0) => self.first(0..1).await.map(drop),
            _ => self.fill(0, &mut Pieces::of(&mut [0])).await,
        }
    }

    /// The first bytes of an unknown object.
    pub async fn open(self, most: u64) -> Result<Beginning, Failure> {
        let (mut broken, mut clock, mut progress) = (0, Clock::default(), Progress::default());
        loop {
            let answer = clock.watch(self.first(0..most)).await?;
            let (facts, date) = (answer.facts(), answer.date);
            let mut bytes = vec![0; facts.size.min(most) as usize];
            let sized = Reading { opened: Some(&facts), ..self };
            let Err(failure) = sized.body(answer, 0, &mut Pieces::of(&mut bytes), &mut clock, &mut progress).await
            else {
                return Ok(Beginning { bytes, facts, date });
            };
            broken += 1;
            self.may_go_on(failure, broken, progress.is_late(0, &clock, self.limits.patience))?;
            clock.watch(sleep(self.pace.backoff(broken - 1))).await;
        }
    }
}

/// Memory for consecutive bytes of an object, in one or several pieces.
#[derive(Debug, Default)]
pub struct Pieces<'a> {
    pieces: Vec<&'a mut [u8]>,
    /// The piece that is being filled, and its bytes so far.
    filling: (usize, usize),
    len: usize,
    done: usize,
}

impl<'a> Pieces<'a> {
    /// One piece.
    pub fn of(piece: &'a mut [u8]) -> Pieces<'a> {
        let mut made = Pieces::default();
        made.push(piece);
        made
    }

    /// Adds a piece after the others.
    pub fn push(&mut self, piece: &'a mut [u8]) {
        self.len += piece.len();
        self.pieces.push(piece);
    }

    /// Bytes of all pieces.
    pub fn bytes(&self) -> usize {
        self.len
    }

    fn left(&self) -> usize {
        self.len - self.done
    }

    /// Copies the next bytes; those that do not fit are left out.
    fn put(&mut self, mut bytes: &[u8]) {
        let (mut number, mut filled) = self.filling;
        while let Some(piece) = self.pieces.get_mut(number)
            && !bytes.is_empty()
        {
            let rest = &mut piece[filled..];
            let (now, later) = bytes.split_at(rest.len().min(bytes.len()));
            rest[..now.len()].copy_from_slice(now);
            (filled, bytes, self.done) = (filled + now.len(), later, self.done + now.len());
            if filled == piece.len() {
                (number, filled) = (number + 1, 0);
            }
        }
        self.filling = (number, filled);
    }
}

/// The waited time when a body last advanced by [`PROGRESS`], and its bytes then.
#[derive(Clone, Copy, Debug, Default)]
struct Progress(Option<(Duration, usize)>);

impl Progress {
    fn since(done: usize, clock: &Clock) -> Progress {
        Progress(Some((clock.waited(), done)))
    }

    /// Records the bytes so far; returns whether the last step takes longer than a limit.
    fn is_late(&mut self, done: usize, clock: &Clock, limit: Duration) -> bool {
        match self.0 {
            Some((since, from)) if done < from + PROGRESS => clock.waited() - since > limit,
            _ => {
                *self = Progress::since(done, clock);
                false
            }
        }
    }
}

/// The state that a store and its objects share.
#[derive(Debug)]
pub struct Link {
    /// The protocol.
    pub client: Box<dyn Client>,
    /// Measurements of the server.
    pub pace: Arc<Pace>,
    /// Limits of requests.
    pub limits: RequestLimits,
    /// The known facts about the objects.
    pub known: Renewed<Known>,
}

impl Link {
    /// The error about a location; a refusal names the credentials.
    pub fn error(&self, failure: &Failure, location: &Location) -> Error {
        let mut error = failure.at(location);
        if matches!(failure.status(), Some(401 | 403)) {
            error.detail = format!("{} (used: {})", error.detail, self.client.credentials());
        }
        error
    }

    /// A reading of one object, which was opened with these facts.
    pub fn reading<'a>(&'a self, key: &'a str, opened: Option<&'a ObjectFacts>) -> Reading<'a> {
        let client = &*self.client;
        Reading { client, pace: &self.pace, limits: &self.limits, key, opened, known: &self.known }
    }
}
