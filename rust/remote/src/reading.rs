//! Reads ranges of one object into memory: slow requests are sent twice, broken bodies go on at the byte where they broke, and
//! every answer must belong to the object that was opened.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use actshard_core::Error;
use actshard_core::location::Location;
use futures_util::StreamExt;
use futures_util::future::{BoxFuture, Either, FutureExt, select};
use tokio::time::{sleep, timeout};

use crate::client::pace::Pace;
use crate::client::{Answer, Client, Expected, Tag, checked, wire};
use crate::failure::{Cause, Failure};
use crate::options::RequestLimits;
use crate::runtime::{ForkLock, reserve};

/// Bytes after which a broken body counts as progress.
const PROGRESS: usize = 64 << 10;
/// The shortest wait for more of a body before another request is made.
const PAUSE: Duration = Duration::from_secs(1);

/// One object, and how to ask for it.
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
    /// Its size, if it is known.
    pub size: Option<u64>,
    /// Its tag; set by the first answer if no listing had one.
    pub tag: &'a ForkLock<Tag>,
    /// The first answers' tags of all objects that no listing had an ETag of, so that two readers do not see two versions.
    pub first_tags: &'a ForkLock<HashMap<String, Tag>>,
}

impl<'a> Reading<'a> {
    fn expected(&self) -> Result<Expected, Failure> {
        let lost = || Failure::new(Cause::Refused, "was being opened when this process was forked: open it again");
        let tag = self.tag.with(|tag| tag.clone()).ok_or_else(lost)?;
        Ok(Expected { size: self.size, tag: Some(tag).filter(|tag| !tag.is_empty()) })
    }

    /// One answer, checked against what is known of the object and against the answers before.
    async fn ask(self, range: Range<u64>) -> Result<Answer, Failure> {
        let expected = self.expected()?;
        let end = Instant::now() + self.limits.patience;
        let answer = wire::until(end, checked(self.client, self.key, range, &expected)).await?;
        let same = self.tag.with(|tag| {
            if !tag.agrees(&answer.tag) {
                return false;
            }
            if tag.etag.is_none() && answer.tag.etag.is_some() {
                let first = self.first_tags.with(|tags| match tags.get(self.key) {
                    Some(first) => first.agrees(&answer.tag),
                    None => tags.insert(self.key.to_string(), answer.tag.clone()).is_none(),
                });
                *tag = answer.tag.clone();
                return first != Some(false);
            }
            true
        });
        if same == Some(false) {
            return Err(Failure::changed("its ETag is another one"));
        }
        Ok(answer)
    }

    /// The first answer; of two, if one is slow.
    async fn first(self, range: Range<u64>) -> Result<Answer, Failure> {
        let mut one = self.ask(range.clone()).boxed();
        if let Ok(answer) = timeout(self.pace.patience(), &mut one).await {
            return answer;
        }
        if !self.pace.may_hedge() {
            return one.await;
        }
        match select(one, self.ask(range).boxed()).await {
            Either::Left((Err(failure), other)) | Either::Right((Err(failure), other)) if failure.is_temporary() => {
                other.await
            }
            Either::Left((answer, _)) | Either::Right((answer, _)) => answer,
        }
    }

    /// Fills a buffer from an offset.
    pub async fn fill(self, at: u64, into: &mut [u8]) -> Result<(), Failure> {
        let _permit = reserve(into.len() as u64).await;
        let (mut done, mut broken) = (0, 0);
        while done < into.len() {
            let before = done;
            let answer = self.first(at + done as u64..at + into.len() as u64).await?;
            let long = self.pace.fly((into.len() - done) as u64);
            let Err(failure) = self.body(answer, at, into, &mut done).await else { break };
            drop(long);
            if done - before >= PROGRESS {
                broken = 0;
            }
            broken += 1;
            if !failure.is_temporary() || broken >= self.limits.tries {
                return Err(failure);
            }
            sleep(self.pace.backoff(broken - 1)).await;
        }
        Ok(())
    }

    /// Copies a body to its place. Another request takes over if nothing arrives for a while.
    async fn body(self, mut answer: Answer, at: u64, into: &mut [u8], done: &mut usize) -> Result<(), Failure> {
        let mut other: Option<BoxFuture<'a, Result<Answer, Failure>>> = None;
        let end = at + into.len() as u64;
        while *done < into.len() {
            let chunk = match other.take() {
                None => match timeout(self.pace.patience().max(PAUSE), answer.body.next()).await {
                    Ok(chunk) => chunk,
                    Err(_) => {
                        other = self.pace.may_hedge().then(|| self.ask(at + *done as u64..end).boxed());
                        continue;
                    }
                },
                Some(waiting) => match select(answer.body.next(), waiting).await {
                    Either::Left((chunk, _)) => chunk,
                    Either::Right((Ok(newer), _)) => {
                        answer = newer;
                        continue;
                    }
                    Either::Right((Err(failure), _)) if failure.is_temporary() => continue,
                    Either::Right((Err(failure), _)) => return Err(failure),
                },
            };
            let chunk = chunk.ok_or_else(|| Failure::new(Cause::Broken, "the answer ended early"))??;
            self.pace.received(chunk.len() as u64);
            let len = chunk.len().min(into.len() - *done);
            into[*done..*done + len].copy_from_slice(&chunk[..len]);
            *done += len;
        }
        Ok(())
    }

    /// Asks for a byte of an object that is known: fails unless it is there, and the same.
    pub async fn still(self) -> Result<(), Failure> {
        match self.size {
            Some(0) => self.first(0..1).await.map(drop),
            _ => self.fill(0, &mut [0]).await,
        }
    }

    /// The first bytes of an object that nothing is known of, with its size and tag.
    pub async fn open(self, most: u64) -> Result<(Vec<u8>, u64, Tag), Failure> {
        let mut broken = 0;
        loop {
            let answer = self.first(0..most).await?;
            let (size, tag) = (answer.size, answer.tag.clone());
            let mut head = vec![0; size.min(most) as usize];
            let mut done = 0;
            let Err(failure) = self.body_of_open(answer, &mut head, &mut done).await else {
                return Ok((head, size, tag));
            };
            broken += 1;
            if !failure.is_temporary() || broken >= self.limits.tries {
                return Err(failure);
            }
            sleep(self.pace.backoff(broken - 1)).await;
        }
    }

    async fn body_of_open(self, answer: Answer, head: &mut [u8], done: &mut usize) -> Result<(), Failure> {
        let sized = Reading { size: Some(answer.size), ..self };
        sized.body(answer, 0, head, done).await
    }
}

/// What a store and its objects share.
#[derive(Debug)]
pub struct Link {
    /// The protocol.
    pub client: Box<dyn Client>,
    /// Measurements of the server.
    pub pace: Arc<Pace>,
    /// Limits of requests.
    pub limits: RequestLimits,
    /// Tags of first answers.
    pub first_tags: ForkLock<HashMap<String, Tag>>,
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

    /// A reading of one object.
    pub fn reading<'a>(&'a self, key: &'a str, size: Option<u64>, tag: &'a ForkLock<Tag>) -> Reading<'a> {
        let (client, first_tags) = (&*self.client, &self.first_tags);
        Reading { client, pace: &self.pace, limits: &self.limits, key, size, tag, first_tags }
    }
}
