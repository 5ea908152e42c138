//! Google's and Azure's credentials: object_store finds them; this module checks that they exist.

use super::{Variables, is_machine_of};
use crate::failure::{Cause, Failure};
use crate::options::ProviderSettings;

/// Fails if there are no credentials for Google Cloud Storage.
pub fn check_google(settings: &ProviderSettings, env: Variables<'_>) -> Result<(), Failure> {
    let given = settings.has(&[
        "skip_signature",
        "bearer_token",
        "service_account",
        "service_account_key",
        "application_credentials",
    ]);
    let variables = [
        "SERVICE_ACCOUNT",
        "GOOGLE_SERVICE_ACCOUNT",
        "GOOGLE_SERVICE_ACCOUNT_PATH",
        "GOOGLE_SERVICE_ACCOUNT_KEY",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "GOOGLE_BEARER_TOKEN",
        "GOOGLE_SKIP_SIGNATURE",
        "GCE_METADATA_HOST",
    ];
    let file = || {
        let home = env("HOME").unwrap_or_default();
        std::path::Path::new(&home).join(".config/gcloud/application_default_credentials.json").exists()
    };
    if given || variables.iter().any(|name| env(name).is_some()) || file() || is_machine_of("Google") {
        return Ok(());
    }
    let text = "no credentials for Google Cloud Storage: set GOOGLE_APPLICATION_CREDENTIALS, run \
                `gcloud auth application-default login`, or use storage_options={\"skip_signature\": \"true\"} for a public bucket";
    Err(Failure::new(Cause::Refused, text))
}

/// Fails if there are no credentials for Azure.
pub fn check_azure(settings: &ProviderSettings, env: Variables<'_>) -> Result<(), Failure> {
    let names = [
        "access_key",
        "sas_key",
        "token",
        "bearer_token",
        "client_id",
        "federated_token_file",
        "use_azure_cli",
        "skip_signature",
        "use_emulator",
        "msi_endpoint",
        "identity_endpoint",
        "fabric_token_service_url",
    ];
    let variables = [
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_ACCESS_KEY",
        "AZURE_STORAGE_KEY",
        "AZURE_STORAGE_SAS_KEY",
        "AZURE_STORAGE_SAS_TOKEN",
        "AZURE_STORAGE_TOKEN",
        "AZURE_CLIENT_ID",
        "AZURE_STORAGE_CLIENT_ID",
        "AZURE_USE_AZURE_CLI",
        "AZURE_FEDERATED_TOKEN_FILE",
        "AZURE_SKIP_SIGNATURE",
        "AZURE_STORAGE_USE_EMULATOR",
        "IDENTITY_ENDPOINT",
        "MSI_ENDPOINT",
    ];
    if settings.has(&names)
        || variables.iter().any(|name| env(name).is_some())
        || is_machine_of("Microsoft Corporation")
    {
        return Ok(());
    }
    let text = "no credentials for Azure: set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY (or a SAS token), or use \
                storage_options={\"account_name\": ..., \"skip_signature\": \"true\"} for a public container";
    Err(Failure::new(Cause::Refused, text))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use crate::address::Provider;
    use crate::options::Options;

    #[test]
    fn missing_credentials_are_told_without_a_request() {
        if is_machine_of("Google") || is_machine_of("Microsoft Corporation") {
            return;
        }
        let none = |_: &str| None;
        let settings = |provider| Options::new([("anon".to_string(), "true".to_string())]).settings(provider).unwrap();
        for failure in
            [check_google(&ProviderSettings::default(), &none), check_azure(&ProviderSettings::default(), &none)]
        {
            assert_eq!(failure.unwrap_err().cause, Cause::Refused);
        }
        assert!(check_google(&settings(Provider::Gcs), &none).is_ok());
        assert!(check_azure(&settings(Provider::Azure), &none).is_ok());
    }
}
