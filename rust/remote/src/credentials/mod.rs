//! Credentials that object_store does not find itself, and the refusal of requests without credentials.

pub mod aws;
pub mod cloud;
pub mod hub;

/// Reads a variable of the environment.
pub type Variables<'a> = &'a dyn Fn(&str) -> Option<String>;

/// A variable of the environment; `None` if it is empty.
pub fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Whether this machine is a virtual one of a vendor, whose metadata server has credentials. Read from the firmware's
/// tables: a request to the metadata server takes a minute if there is none.
fn is_machine_of(vendor: &str) -> bool {
    ["sys_vendor", "product_name", "bios_vendor", "board_asset_tag", "chassis_asset_tag"].iter().any(|name| {
        std::fs::read_to_string(format!("/sys/class/dmi/id/{name}")).is_ok_and(|text| text.contains(vendor))
    })
}
