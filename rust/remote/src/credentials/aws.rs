//! The files of the AWS tools: static keys, `credential_process`, region and endpoint of a profile. object_store reads
//! everything else: the environment, web identities, containers and the metadata server.

use std::collections::HashMap;
use std::io::Read;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use object_store::CredentialProvider;
use object_store::aws::{AmazonS3Builder, AwsCredential};
use serde::Deserialize;

use super::{Variables, is_machine_of};
use crate::address::Provider;
use crate::checks::{not_a_header, why_not};
use crate::failure::{Cause, Failure};
use crate::options::{ProviderSettings, Secret, plain};
use crate::runtime::PerProcess;
use actshard_core::threads::ForkSafe;

/// The settings that the profile adds to the options and the environment.
#[derive(Debug, Default)]
pub struct ProfileFound {
    region: Option<String>,
    endpoint: Option<String>,
    keys: ProfileKeys,
}

#[derive(Debug, Default)]
enum ProfileKeys {
    /// object_store finds them.
    #[default]
    Elsewhere,
    Static {
        id: String,
        secret: Secret,
        token: Option<Secret>,
    },
    Process(Secret),
}

impl ProfileFound {
    /// Applies the settings. `patience` is the maximum run time of a program for credentials.
    pub fn apply(self, mut builder: AmazonS3Builder, patience: Duration) -> Result<AmazonS3Builder, Failure> {
        self.check()?;
        if let Some(region) = self.region {
            builder = builder.with_region(region);
        }
        if let Some(endpoint) = self.endpoint {
            builder = builder.with_endpoint(endpoint);
        }
        Ok(match self.keys {
            ProfileKeys::Elsewhere => builder,
            ProfileKeys::Static { id, secret, token } => {
                let token = token.map(|token| token.0);
                let credential = AwsCredential { key_id: id, secret_key: secret.0, token };
                builder.with_credentials(Arc::new(object_store::StaticCredentialProvider::new(credential)))
            }
            ProfileKeys::Process(command) => {
                builder.with_credentials(Arc::new(ProcessProvider::new(command, patience)))
            }
        })
    }

    /// Fails for values that object_store cannot use.
    fn check(&self) -> Result<(), Failure> {
        let mut values = vec![("region", self.region.as_deref()), ("endpoint_url", self.endpoint.as_deref())];
        if let ProfileKeys::Static { id, secret, token } = &self.keys {
            values.push(("aws_access_key_id", Some(id)));
            values.push(("aws_secret_access_key", Some(&secret.0)));
            values.push(("aws_session_token", token.as_ref().map(|token| token.0.as_str())));
        }
        for (name, value) in values {
            if let Some(why) = value.and_then(|value| why_not(&plain(Provider::S3, name), value)) {
                return Err(Failure::new(Cause::Refused, format!("profile in the AWS files: {name}: {why}")));
            }
        }
        Ok(())
    }
}

type Section = HashMap<String, String>;

/// The sections of an INI file. Nested settings (`s3 =` followed by indented lines) become `s3.NAME`.
fn sections(text: &str) -> HashMap<String, Section> {
    let (mut made, mut name, mut parent): (HashMap<String, Section>, String, String) = Default::default();
    for line in text.lines() {
        let bare = line.trim();
        if bare.is_empty() || bare.starts_with(['#', ';']) {
            continue;
        }
        if let Some(inside) = bare.strip_prefix('[') {
            let inside = inside.split(']').next().unwrap_or_default().trim();
            name = inside.strip_prefix("profile ").unwrap_or(inside).trim().to_string();
            parent.clear();
            made.entry(name.clone()).or_default();
            continue;
        }
        let Some((key, value)) = bare.split_once('=') else { continue };
        let (key, value) = (key.trim().to_ascii_lowercase(), value.trim());
        let value = value.split(" #").next().unwrap_or(value).trim();
        let key = if line.starts_with([' ', '\t']) && !parent.is_empty() { format!("{parent}.{key}") } else { key };
        if value.is_empty() {
            parent = key;
            continue;
        }
        if !key.contains('.') {
            parent.clear();
        }
        made.entry(name.clone()).or_default().insert(key, value.to_string());
    }
    made
}

/// Looks for credentials. Fails if there are none at all.
pub fn find(settings: &ProviderSettings, env: Variables<'_>) -> Result<ProfileFound, Failure> {
    let home = env("HOME").unwrap_or_default();
    let path = |variable: &str, name: &str| {
        env(variable).map_or_else(|| PathBuf::from(&home).join(".aws").join(name), PathBuf::from)
    };
    let profile = settings.profile.clone().or_else(|| env("AWS_PROFILE")).or_else(|| env("AWS_DEFAULT_PROFILE"));
    let chosen = profile.is_some();
    let profile = profile.unwrap_or_else(|| "default".to_string());
    let mut merged = Section::new();
    let mut exists = false;
    for (variable, name) in [("AWS_CONFIG_FILE", "config"), ("AWS_SHARED_CREDENTIALS_FILE", "credentials")] {
        let text = std::fs::read_to_string(path(variable, name)).unwrap_or_default();
        if let Some(section) = sections(&text).remove(&profile) {
            exists = true;
            merged.extend(section);
        }
    }
    if chosen && !exists {
        return Err(Failure::new(
            Cause::Refused,
            format!("no profile {profile:?} in the AWS files (~/.aws/config, ~/.aws/credentials)"),
        ));
    }
    let mut found = ProfileFound {
        region: merged.get("region").cloned().filter(|_| !is_set(env, &["AWS_REGION", "AWS_DEFAULT_REGION"])),
        endpoint: merged
            .get("endpoint_url")
            .cloned()
            .filter(|_| !is_set(env, &["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"])),
        keys: ProfileKeys::Elsewhere,
    };
    if settings.is_on("skip_signature") || settings.has(&["access_key_id", "web_identity_token_file"]) {
        return Ok(found);
    }
    let automatic = [
        "AWS_ACCESS_KEY_ID",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "AWS_SKIP_SIGNATURE",
    ];
    let explicit = settings.profile.is_some();
    if !explicit && is_set(env, &automatic) {
        return Ok(found);
    }
    if let (Some(id), Some(secret)) = (merged.get("aws_access_key_id"), merged.get("aws_secret_access_key")) {
        let token = merged.get("aws_session_token").cloned().map(Secret);
        found.keys = ProfileKeys::Static { id: id.clone(), secret: Secret(secret.clone()), token };
    } else if let Some(command) = merged.get("credential_process") {
        found.keys = ProfileKeys::Process(Secret(command.clone()));
    } else if ["role_arn", "sso_session", "sso_start_url"].iter().any(|name| merged.contains_key(*name)) {
        let text = format!(
            "profile {profile:?} uses a role or single sign-on: add `credential_process = aws configure export-credentials \
             --profile {profile} --format process` to a profile, or export its keys"
        );
        return Err(Failure::new(Cause::Refused, text));
    } else if !(settings.has(&["metadata_endpoint", "container_credentials_full_uri"])
        || is_set(env, &["AWS_METADATA_ENDPOINT", "AWS_EC2_METADATA_SERVICE_ENDPOINT"])
        || is_machine_of("Amazon"))
    {
        let text = "no credentials for S3: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile in ~/.aws/credentials, \
                    or use storage_options={\"skip_signature\": \"true\"} for a public bucket";
        return Err(Failure::new(Cause::Refused, text));
    }
    Ok(found)
}

fn is_set(env: Variables<'_>, names: &[&str]) -> bool {
    names.iter().any(|name| env(name).is_some_and(|value| !value.is_empty()))
}

/// Credentials of a program.
#[derive(Clone)]
struct Kept {
    credential: Arc<AwsCredential>,
    made: Instant,
    /// From this time on, one request renews them, while the others use these.
    renew: Option<SystemTime>,
    /// From this time on they are not used.
    end: Option<SystemTime>,
}

/// New credentials are requested this long before the old ones expire; the old ones are used until the second time
/// before it.
const RENEW: Duration = Duration::from_secs(300);
const SPARE: Duration = Duration::from_secs(30);

/// Credentials that a program prints. It runs once at a time.
struct ProcessProvider {
    command: Secret,
    patience: Duration,
    kept: ForkSafe<Option<Kept>>,
    asking: PerProcess<Arc<tokio::sync::Mutex<()>>>,
}

impl std::fmt::Debug for ProcessProvider {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ProcessProvider")
    }
}

impl ProcessProvider {
    fn new(command: Secret, patience: Duration) -> ProcessProvider {
        ProcessProvider { command, patience, kept: ForkSafe::default(), asking: PerProcess::default() }
    }

    fn kept(&self) -> Option<Kept> {
        self.kept.with(|kept| kept.clone()).flatten()
    }

    /// Runs the program, and keeps its output.
    async fn renewed(&self) -> Result<Arc<AwsCredential>, Failure> {
        let (command, patience) = (self.command.0.clone(), self.patience);
        let printed = tokio::task::spawn_blocking(move || run(&command, patience)).await;
        let printed = printed.map_err(|_| Failure::new(Cause::Refused, "credential_process failed"))??;
        let end = printed.expiration.as_deref().and_then(time_of);
        let before = |time: Duration| end.and_then(|end| end.checked_sub(time));
        // Credentials that expire soon mark the end of a session: the program would print the same ones again.
        let first = |times: &[Duration]| {
            let now = SystemTime::now();
            times.iter().find_map(|time| before(*time).filter(|time| *time > now)).or(end)
        };
        let (renew, end) = (first(&[RENEW, SPARE]), first(&[SPARE]));
        let credential = Arc::new(AwsCredential {
            key_id: printed.access_key_id,
            secret_key: printed.secret_access_key,
            token: printed.session_token,
        });
        let kept = Kept { credential: Arc::clone(&credential), made: Instant::now(), renew, end };
        self.kept.with(|slot| *slot = Some(kept));
        Ok(credential)
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Printed {
    access_key_id: String,
    secret_access_key: String,
    session_token: Option<String>,
    expiration: Option<String>,
}

/// The longest output of a program for credentials.
const LONGEST_OUTPUT: u64 = 1 << 20;

/// Runs a command until it ends, or a time has passed.
fn run(command: &str, patience: Duration) -> Result<Printed, Failure> {
    let refused = |text: String| Failure::new(Cause::Refused, text);
    let failed = |error: std::io::Error| refused(format!("credential_process: {error}"));
    let mut child = Command::new("sh");
    let child = child.arg("-c").arg(command).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = child.spawn().map_err(failed)?;
    let (send, receive) = std::sync::mpsc::channel();
    let pipe = child.stdout.take();
    // Its children may keep the pipe open when it was killed: nothing waits for this thread then.
    let reader = std::thread::Builder::new().spawn(move || {
        let mut printed = vec![];
        let read = pipe.map(|pipe| pipe.take(LONGEST_OUTPUT).read_to_end(&mut printed));
        let _ = send.send(read.unwrap_or(Ok(0)).map(|_| printed));
    });
    reader.map_err(failed)?;
    let end = Instant::now() + patience;
    let printed = receive.recv_timeout(patience);
    let mut status = child.try_wait().map_err(failed)?;
    while status.is_none() && printed.is_ok() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(5));
        status = child.try_wait().map_err(failed)?;
    }
    let (Ok(printed), Some(status)) = (printed, status) else {
        let _ = child.kill();
        let _ = child.wait();
        return Err(refused(format!("credential_process printed nothing within {patience:?}: does it ask for input?")));
    };
    let output = std::process::Output { status, stdout: printed.map_err(failed)?, stderr: vec![] };
    if !output.status.success() {
        return Err(refused(format!("credential_process failed with {}", output.status)));
    }
    let printed: Printed = serde_json::from_slice(&output.stdout)
        .map_err(|_| refused("credential_process: expected its JSON output".to_string()))?;
    let token = printed.session_token.as_deref().unwrap_or_default();
    for value in [printed.access_key_id.as_str(), &printed.secret_access_key, token] {
        if let Some(why) = not_a_header(value) {
            return Err(refused(format!("credential_process: a key: {why}")));
        }
    }
    Ok(printed)
}

#[async_trait]
impl CredentialProvider for ProcessProvider {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        let failed = |failure: Failure| object_store::Error::Generic { store: "S3", source: Box::new(failure) };
        let is_before = |time: Option<SystemTime>| time.is_none_or(|time| SystemTime::now() < time);
        let kept = self.kept();
        if let Some(kept) = kept.as_ref().filter(|kept| is_before(kept.renew)) {
            return Ok(Arc::clone(&kept.credential));
        }
        let asking = self.asking.get(|| Ok::<_, Failure>(Arc::default())).map_err(failed)?;
        let asked = Instant::now();
        let guard = match (asking.try_lock(), kept.filter(|kept| is_before(kept.end))) {
            (Ok(guard), _) => guard,
            (Err(_), Some(kept)) => return Ok(kept.credential),
            (Err(_), None) => asking.lock().await,
        };
        // Another request may have renewed them meanwhile.
        if let Some(kept) = self.kept().filter(|kept| kept.made >= asked || is_before(kept.renew)) {
            return Ok(kept.credential);
        }
        let made = self.renewed().await.map_err(failed);
        drop(guard);
        made
    }
}

/// Parses `YYYY-MM-DDTHH:MM:SSZ`, with or without a fraction; other zones end early, which is harmless.
pub fn time_of(text: &str) -> Option<SystemTime> {
    let number = |range: std::ops::Range<usize>| text.get(range)?.parse::<u64>().ok();
    let (year, month, day) = (number(0..4)?, number(5..7)?, number(8..10)?);
    let (hour, minute, second) = (number(11..13)?, number(14..16)?, number(17..19)?);
    if year < 1970 || !(1..=12).contains(&month) {
        return None;
    }
    // Days since 1970 of the civil calendar: years begin in March, so that a leap day ends one.
    let (y, m) = if month <= 2 { (year - 1, month + 9) } else { (year, month - 3) };
    let days = 365 * y + y / 4 - y / 100 + y / 400 + (153 * m + 2) / 5 + day - 1;
    let days = days.checked_sub(719_468)?;
    UNIX_EPOCH.checked_add(Duration::from_secs(days * 86_400 + hour * 3_600 + minute * 60 + second))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use crate::options::Options;

    fn found(
        config: &str,
        credentials: &str,
        options: &[(&str, &str)],
        vars: &[(&str, &str)],
    ) -> Result<ProfileFound, Failure> {
        let folder = tempfile::tempdir().unwrap();
        let (a, b) = (folder.path().join("config"), folder.path().join("credentials"));
        std::fs::write(&a, config).unwrap();
        std::fs::write(&b, credentials).unwrap();
        let env = |name: &str| match name {
            "AWS_CONFIG_FILE" => Some(a.to_str().unwrap().to_string()),
            "AWS_SHARED_CREDENTIALS_FILE" => Some(b.to_str().unwrap().to_string()),
            _ => vars.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_string()),
        };
        let options = Options::new(options.iter().map(|(a, b)| ((*a).to_string(), (*b).to_string())));
        find(&options.settings(Provider::S3).unwrap(), &env)
    }

    const CONFIG: &str = "[default]\nregion = eu-west-1\ns3 =\n  addressing_style = path\n[profile lab]\nregion=eu-north-1\n\
                          credential_process = printf '{\"AccessKeyId\":\"a\",\"SecretAccessKey\":\"b\"}'\n[profile sso]\nsso_session = x\n";
    const KEYS: &str = "# mine\n[default]\naws_access_key_id = id\naws_secret_access_key = swordfish\n";

    #[test]
    fn profiles_are_read_from_both_files() {
        let default = found(CONFIG, KEYS, &[], &[]).unwrap();
        assert_eq!(default.region.as_deref(), Some("eu-west-1"));
        assert!(matches!(default.keys, ProfileKeys::Static { ref id, .. } if id == "id"));
        assert!(!format!("{default:?}").contains("swordfish"));
        let lab = found(CONFIG, KEYS, &[("profile", "lab")], &[("AWS_ACCESS_KEY_ID", "x")]).unwrap();
        let ProfileKeys::Process(command) = lab.keys else { panic!("{lab:?}") };
        assert_eq!(run(&command.0, Duration::from_secs(60)).unwrap().access_key_id, "a");
        let environment = found(CONFIG, KEYS, &[], &[("AWS_ACCESS_KEY_ID", "x")]).unwrap();
        assert!(matches!(environment.keys, ProfileKeys::Elsewhere));
    }

    #[test]
    fn missing_credentials_are_told_without_a_request() {
        if is_machine_of("Amazon") {
            return;
        }
        let refused = |result: Result<ProfileFound, Failure>| result.unwrap_err().text;
        assert!(refused(found("", "", &[], &[])).contains("skip_signature"));
        assert!(refused(found(CONFIG, "", &[], &[("AWS_PROFILE", "none")])).contains("no profile \"none\""));
        assert!(refused(found(CONFIG, "", &[("profile", "sso")], &[])).contains("export-credentials"));
        assert!(found("", "", &[("anon", "true")], &[]).is_ok());
    }

    #[test]
    fn times_are_those_of_the_calendar() {
        let seconds = |text| time_of(text).map(|time| time.duration_since(UNIX_EPOCH).unwrap().as_secs());
        assert_eq!(seconds("1970-01-01T00:00:00Z"), Some(0));
        assert_eq!(seconds("2024-02-29T12:30:15Z"), Some(1_709_209_815));
        assert_eq!(seconds("2026-12-31T23:59:59.5Z"), Some(1_798_761_599));
        assert_eq!(seconds("soon"), None);
    }
}
