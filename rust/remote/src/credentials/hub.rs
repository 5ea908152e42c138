//! The hub's endpoint and token, in the order of huggingface_hub.

use std::path::PathBuf;

use super::Variables;
use crate::options::{ProviderSettings, Secret, is_true};

/// How to reach the hub.
#[derive(Debug)]
pub struct HubAccess {
    /// The URL, without a slash at the end.
    pub endpoint: String,
    /// The token, if there is one.
    pub token: Option<Secret>,
    /// Whether requests are forbidden.
    pub offline: bool,
}

/// Finds the endpoint and the token: the options, `HF_TOKEN`, `HUGGING_FACE_HUB_TOKEN`, then the file of `hf auth login`.
pub fn find(settings: &ProviderSettings, env: Variables<'_>) -> HubAccess {
    let text = |name: &str| env(name).map(|value| value.trim().to_string()).filter(|value| !value.is_empty());
    let implicit = !text("HF_HUB_DISABLE_IMPLICIT_TOKEN").is_some_and(|value| is_true(&value));
    let found = || text("HF_TOKEN").or_else(|| text("HUGGING_FACE_HUB_TOKEN")).or_else(|| file(&text));
    let given = settings.get("token").map(|token| token.trim().to_string());
    let token = match given {
        // An empty one means anonymous access.
        Some(token) => Some(token).filter(|token| !token.is_empty() && !token.eq_ignore_ascii_case("false")),
        None => implicit.then(found).flatten(),
    };
    let endpoint = settings.get("endpoint").map(str::to_string).or_else(|| text("HF_ENDPOINT"));
    HubAccess {
        endpoint: endpoint.unwrap_or_else(|| "https://huggingface.co".to_string()).trim_end_matches('/').to_string(),
        token: token.map(Secret),
        offline: text("HF_HUB_OFFLINE").is_some_and(|value| is_true(&value)),
    }
}

fn file(text: &dyn Fn(&str) -> Option<String>) -> Option<String> {
    let home = text("HOME").map(PathBuf::from);
    let cache = text("XDG_CACHE_HOME").map(PathBuf::from).or_else(|| Some(home?.join(".cache")));
    let folder = text("HF_HOME").map(PathBuf::from).or_else(|| Some(cache?.join("huggingface")));
    let path = text("HF_TOKEN_PATH").map(PathBuf::from).or_else(|| Some(folder?.join("token")))?;
    let found = std::fs::read_to_string(path).ok()?.trim().to_string();
    (!found.is_empty()).then_some(found)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use crate::address::Provider;
    use crate::options::Options;

    #[test]
    fn options_win_over_the_environment_and_that_over_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        std::fs::write(&path, "from_file\n").unwrap();
        let path = path.to_str().unwrap().to_string();
        let token = |pairs: &[(&str, &str)], vars: &[(&str, &str)]| {
            let options = Options::new(pairs.iter().map(|(a, b)| ((*a).to_string(), (*b).to_string())));
            let vars: Vec<(String, String)> = vars.iter().map(|(a, b)| ((*a).to_string(), (*b).to_string())).collect();
            let env = move |name: &str| vars.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone());
            find(&options.settings(Provider::Hub).unwrap(), &env).token.map(|token| token.0)
        };
        let vars = [("HF_TOKEN", "from_env"), ("HF_TOKEN_PATH", path.as_str())];
        assert_eq!(token(&[("token", "given")], &vars).as_deref(), Some("given"));
        assert_eq!(token(&[], &vars).as_deref(), Some("from_env"));
        assert_eq!(token(&[], &vars[1..]).as_deref(), Some("from_file"));
        assert_eq!(token(&[("token", "")], &vars), None);
        assert_eq!(token(&[], &[vars[0], ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")]), None);
    }
}
