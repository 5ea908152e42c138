//! One request and its answer, with retries; the same for all clients. object_store sends its requests through it too.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody, HttpResponse, HttpResponseBody,
    HttpService,
};
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use tokio::time::{sleep, timeout};

use super::PAGE;
use super::pace::Pace;
use super::spoken::Spoken;
use super::times::ServerDate;
use crate::clock::Clock;
use crate::failure::{Cause, Failure};
use crate::options::RequestLimits;

tokio::task_local! {
    /// The deadline of all attempts of the current read.
    static DEADLINE: Instant;
}

/// Maximum number of attempts if a 404 without a reason may come from a proxy.
const FOREIGN: u32 = 3;
/// The longest body of an error that is read.
const ERROR_BODY: usize = 8 << 10;

/// Sends requests on one pool of connections.
#[derive(Clone, Debug)]
pub struct Wire {
    http: reqwest::Client,
    limits: Arc<RequestLimits>,
    pace: Arc<Pace>,
    /// Whether the service names the reason of a 404.
    names_reasons: bool,
}

/// Runs a future whose requests end before a deadline.
pub async fn until<F: Future>(deadline: Instant, future: F) -> F::Output {
    DEADLINE.scope(deadline, future).await
}

impl Wire {
    /// A new pool of connections. Must be called inside the runtime.
    pub fn new(limits: Arc<RequestLimits>, pace: Arc<Pace>) -> Result<Wire, Failure> {
        let mut builder = reqwest::Client::builder()
            .http1_only()
            .redirect(reqwest::redirect::Policy::none())
            .user_agent(limits.agent.clone())
            .connect_timeout(limits.connect)
            .read_timeout(limits.stall)
            .pool_idle_timeout(limits.idle)
            .referer(false);
        if let Some(proxy) = &limits.proxy {
            let proxy = reqwest::Proxy::all(&proxy.0);
            builder = builder.proxy(proxy.map_err(|_| Failure::new(Cause::Refused, "proxy_url: expected a URL"))?);
        }
        let http = builder.build().map_err(|error| {
            let text = format!("cannot start an HTTP client: {}", error.without_url());
            Failure::new(Cause::Refused, text)
        })?;
        Ok(Wire { http, limits, pace, names_reasons: false })
    }

    /// The same for a service that names the reason of each 404: one without a reason comes from another server, such
    /// as a proxy.
    pub fn naming_reasons(self) -> Wire {
        Wire { names_reasons: true, ..self }
    }

    /// A GET.
    pub fn get(url: &str, headers: &[(HeaderName, String)]) -> Result<HttpRequest, Failure> {
        let mut request = HttpRequest::new(HttpRequestBody::empty());
        let invalid = |_| Failure::new(Cause::Refused, "a name that cannot be part of a URL");
        *request.uri_mut() = url.parse().map_err(invalid)?;
        for (name, value) in headers {
            let mut value =
                HeaderValue::from_str(value).map_err(|_| Failure::new(Cause::Refused, "a token with line breaks"))?;
            value.set_sensitive(true);
            request.headers_mut().insert(name, value);
        }
        Ok(request)
    }

    /// Sends a request, with retries if they may help. Returns answers of success and redirects.
    pub async fn send(&self, request: HttpRequest) -> Result<HttpResponse, Failure> {
        // reqwest parses the address again, and panics if it finds it invalid.
        if reqwest::Url::parse(&request.uri().to_string()).is_err() {
            return Err(Failure::new(Cause::Refused, "an invalid URL"));
        }
        let end = DEADLINE.try_with(|end| *end).unwrap_or_else(|_| Instant::now() + self.limits.patience);
        let (patience, mut clock) = (end.saturating_duration_since(Instant::now()), Clock::default());
        let repeatable = request.method().is_safe();
        // The answer to a HEAD has no body, so no reason either.
        let names_reasons = self.names_reasons && request.method().as_str() == "GET";
        let host = request.uri().authority().map(ToString::to_string).unwrap_or_default();
        let mut tried = 0;
        loop {
            if let Some((held, why)) = self.pace.held(&host) {
                let left = patience.saturating_sub(clock.waited());
                clock.watch(self.rest(held, left, why)).await?;
            }
            self.pace.count_request();
            let failure = match clock.watch(self.once(&request)).await {
                Ok(answer) => return Ok(answer),
                Err(failure) => failure,
            };
            let failure = Failure { is_foreign: names_reasons && failure.is_unnamed(), ..failure };
            tried += 1;
            let may_help = failure.is_temporary() || failure.is_foreign && tried < FOREIGN;
            if !repeatable || !may_help || tried >= self.limits.tries {
                return Err(tired(failure, tried));
            }
            if let Some(after) = failure.after {
                // No longer than a read waits: the next read sends a request again, whatever wait the server asked for.
                self.pace.hold(&host, after.min(self.limits.patience), &failure);
            }
            let wait = failure.after.unwrap_or_else(|| self.pace.backoff(tried - 1));
            let left = patience.saturating_sub(clock.waited());
            clock.watch(self.rest(wait, left, tired(failure, tried))).await?;
            self.pace.count_retry();
        }
    }

    /// Waits. If that would take longer than the rest of the time, returns the last failure at once.
    async fn rest(&self, wait: Duration, left: Duration, failure: Failure) -> Result<(), Failure> {
        if wait > left {
            let asked =
                failure.after.map(|after| format!("{} (the server asks to wait {} s)", failure.text, after.as_secs()));
            let text = asked.map_or(failure.text.clone(), |text| text.trim_start().to_string());
            return Err(Failure { text, ..failure });
        }
        sleep(wait).await;
        Ok(())
    }

    async fn once(&self, request: &HttpRequest) -> Result<HttpResponse, Failure> {
        let started = Instant::now();
        // reqwest's own limit covers the wait for the headers as well, but its error does not distinguish them.
        let sent = timeout(self.limits.connect + self.limits.stall, HttpService::call(&self.http, request.clone()));
        let answer = sent.await.map_err(|_| Failure::new(Cause::Broken, "no answer in time"))?;
        let mut answer = answer.map_err(|error| Failure::of_transport(&error))?;
        self.pace.answered(started.elapsed());
        if let Some(date) = ServerDate::of(answer.headers()) {
            answer.extensions_mut().insert(date);
        }
        let status = answer.status().as_u16();
        if Wire::header(answer.headers(), "content-range").is_some_and(is_absurd) {
            return Err(Failure::new(Cause::Protocol, "an answer with an impossible range"));
        }
        if (200..300).contains(&status) || ((300..400).contains(&status) && answer.headers().contains_key("location")) {
            return Ok(answer);
        }
        let (parts, body) = answer.into_parts();
        let (body, spoken) = (first(body.bytes_stream()).await, Spoken::of(request));
        Err(Failure::of_answer(status, &parts.headers, &body, |text| spoken.hide(text)))
    }

    /// The whole body of an answer, up to a limit.
    pub async fn body(&self, answer: HttpResponse, most: usize) -> Result<Vec<u8>, Failure> {
        self.whole(answer.into_body(), most).await
    }

    async fn whole(&self, body: HttpResponseBody, most: usize) -> Result<Vec<u8>, Failure> {
        use futures_util::StreamExt;
        let (mut stream, mut made) = (body.bytes_stream(), vec![]);
        let mut clock = Clock::default();
        while let Some(chunk) = clock.watch(stream.next()).await {
            if clock.waited() > self.limits.patience {
                return Err(Failure::new(Cause::Broken, "an answer that does not end in time"));
            }
            let chunk = chunk.map_err(|error| Failure::of_transport(&error))?;
            self.pace.received(chunk.len() as u64);
            if made.len() + chunk.len() > most {
                return Err(Failure::new(Cause::Protocol, format!("an answer of more than {most} bytes")));
            }
            made.extend_from_slice(&chunk);
        }
        Ok(made)
    }

    /// The headers of an answer as text.
    pub fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
        headers.get(name).and_then(|value| value.to_str().ok())
    }
}

/// Whether a `Content-Range` has numbers whose sums overflow; object_store does not check them.
fn is_absurd(range: &str) -> bool {
    range.split(|c: char| !c.is_ascii_digit()).any(|number| number.len() > 18)
}

/// A failure after several attempts.
fn tired(mut failure: Failure, tried: u32) -> Failure {
    if tried > 1 {
        failure.text = format!("{} (after {tried} attempts)", failure.text).trim_start().to_string();
    }
    failure
}

/// The first bytes of a body, as far as they arrive.
async fn first(mut body: futures_util::stream::BoxStream<'static, Result<bytes::Bytes, HttpError>>) -> Vec<u8> {
    use futures_util::StreamExt;
    let mut made = vec![];
    let all = async {
        while let Some(Ok(chunk)) = body.next().await {
            made.extend_from_slice(&chunk);
            if made.len() >= ERROR_BODY {
                break;
            }
        }
    };
    let _ = timeout(Duration::from_secs(5), all).await;
    made.truncate(ERROR_BODY);
    made
}

#[async_trait]
impl HttpService for Wire {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let lists = |query: &str| query.contains("list-type=2") || query.contains("comp=list");
        // object_store does not retry an error of unknown kind: all useful retries were made here.
        let failed = |failure| HttpError::new(HttpErrorKind::Unknown, failure);
        if !request.uri().query().is_some_and(lists) {
            return self.send(request).await.map_err(failed);
        }
        self.pace.count_listing();
        let mut page = self.send(request).await.map_err(failed)?;
        let body = std::mem::replace(page.body_mut(), HttpResponseBody::from(bytes::Bytes::new()));
        let body = self.whole(body, PAGE).await.map_err(failed)?;
        *page.body_mut() = body.into();
        Ok(page)
    }
}

impl HttpConnector for Wire {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(self.clone()))
    }
}
