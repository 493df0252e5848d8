//! Which requests the server answers: those that name it as their host and have its token; requests
//! for work must also come from its own page.

use crate::failure::{Failure, code};
use std::net::{IpAddr, SocketAddr};
use tiny_http::{Header, Request, Response};

/// An answer to a request.
pub type Page = Response<std::io::Cursor<Vec<u8>>>;

/// Why a request is not answered: the status, and a sentence.
pub type Refused = (u16, &'static str);

/// The conditions that a request must meet.
pub struct Door {
    /// The names of this server; the first one is printed. A page on another site whose name
    /// resolves to this machine has a different name.
    hosts: Vec<String>,
    /// Which addresses also count as names of this server.
    addresses: Addresses,
    token: String,
}

/// Addresses that a request may name as its host, beside the server's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Addresses {
    /// None.
    Named,
    /// All: the server listens on all addresses of the machine. No page of another site can have a
    /// numeric address as its name and this server behind it.
    Any,
}

impl Door {
    /// The door of a server that listens on `bound`, with a new token. `host` is the name that the
    /// user gave.
    pub fn new(bound: SocketAddr, host: &str) -> Result<Self, Failure> {
        let port = bound.port();
        let with_port = |name: &str| format!("{name}:{port}");
        let (addresses, mut hosts) = match bound.ip().is_unspecified() {
            true => (Addresses::Any, machine_name().iter().map(|name| with_port(name)).collect()),
            false => (Addresses::Named, vec![bound.to_string()]),
        };
        if bound.ip().is_unspecified() || bound.ip().is_loopback() {
            hosts.push(with_port("localhost"));
        }
        if host.parse::<IpAddr>().is_err() && !host.starts_with('[') {
            hosts.insert(0, with_port(host));
        }
        Ok(Self { hosts, addresses, token: random_letters()? })
    }

    /// The address with the token.
    pub fn url(&self) -> String {
        format!("http://{}/?token={}", self.hosts[0], self.token)
    }

    /// Refuses a request for another host, and one without the token.
    pub fn admit(&self, request: &Request) -> Result<(), Refused> {
        if !header(request, "Host").is_some_and(|host| self.is_named(host)) {
            return Err((403, "the request is not for this server"));
        }
        let given = parameter(request.url(), "token").unwrap_or_default();
        if !is_equal(given.as_bytes(), self.token.as_bytes()) {
            return Err((403, "use the address that `foretell serve` printed, with its token"));
        }
        Ok(())
    }

    /// Whether a host is a name of this server.
    fn is_named(&self, host: &str) -> bool {
        let is_address = || host.parse::<SocketAddr>().is_ok() || host.parse::<IpAddr>().is_ok();
        self.hosts.iter().any(|known| known == host) || (self.addresses == Addresses::Any && is_address())
    }

    /// Refuses a request that another site's page makes. Browsers say where a request comes from.
    pub fn admit_from_own_page(&self, request: &Request) -> Result<(), Refused> {
        let origin = header(request, "Origin").and_then(|origin| origin.strip_prefix("http://"));
        let site = header(request, "Sec-Fetch-Site");
        let is_own = origin.is_some_and(|origin| self.is_named(origin) && header(request, "Host") == Some(origin));
        match is_own && site.is_none_or(|site| site == "same-origin") {
            true => Ok(()),
            false => Err((403, "only the page of this server may ask")),
        }
    }
}

/// The name by which other machines know this one, if it has one.
fn machine_name() -> Option<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
    let name = name.trim();
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-');
    (!name.is_empty() && name.bytes().all(is_plain)).then(|| name.to_owned())
}

/// The value of a request's header.
fn header<'a>(request: &'a Request, name: &'static str) -> Option<&'a str> {
    request.headers().iter().find(|header| header.field.equiv(name)).map(|header| header.value.as_str())
}

/// The value of a parameter in an address, as written.
pub fn parameter<'a>(url: &'a str, name: &str) -> Option<&'a str> {
    let (_, query) = url.split_once('?')?;
    query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))
}

/// Random letters that no other process can guess.
pub fn random_letters() -> Result<String, Failure> {
    let mut bytes = [0_u8; 16];
    getrandom::fill(&mut bytes)
        .map_err(|error| Failure::undone(code::SYSTEM, format!("the system gives no random bytes: {error}")))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Compares in a time that does not depend on how much is equal.
fn is_equal(one: &[u8], other: &[u8]) -> bool {
    one.len() == other.len() && one.iter().zip(other).fold(0, |different, (a, b)| different | (a ^ b)) == 0
}

/// An answer of plain text.
pub fn plain(status: u16, text: &str) -> Page {
    with_headers(Response::from_string(text).with_status_code(status), &[("Content-Type", "text/plain; charset=utf-8")])
}

/// Adds headers, including those that every answer has.
pub fn with_headers(mut response: Page, headers: &[(&str, &str)]) -> Page {
    const ALWAYS: [(&str, &str); 4] = [
        ("Cache-Control", "no-store"),
        ("Referrer-Policy", "no-referrer"),
        ("X-Content-Type-Options", "nosniff"),
        ("Cross-Origin-Resource-Policy", "same-origin"),
    ];
    for (name, value) in headers.iter().chain(&ALWAYS) {
        if let Ok(header) = Header::from_bytes(*name, *value) {
            response.add_header(header);
        }
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_equal_as_a_whole_only() {
        assert!(is_equal(b"abc", b"abc"));
        for other in [&b"abd"[..], b"ab", b"abcd", b""] {
            assert!(!is_equal(b"abc", other));
        }
    }

    #[test]
    fn a_server_is_named_by_what_it_listens_on() {
        let door = |bound: &str, host: &str| Door::new(bound.parse().expect("an address"), host).expect("a door");
        let own = door("127.0.0.1:80", "127.0.0.1");
        assert!(own.is_named("127.0.0.1:80") && own.is_named("localhost:80"));
        assert!(!own.is_named("127.0.0.1:81") && !own.is_named("10.0.0.1:80") && !own.is_named("evil.example:80"));
        assert!(own.url().starts_with("http://127.0.0.1:80/?token="));
        let named = door("10.0.0.1:80", "node1");
        assert!(named.is_named("node1:80") && named.is_named("10.0.0.1:80") && !named.is_named("localhost:80"));
        assert!(named.url().starts_with("http://node1:80/"));
        let all = door("0.0.0.0:80", "0.0.0.0");
        assert!(all.is_named("10.0.0.2:80") && all.is_named("[::1]:80") && all.is_named("localhost:80"));
        assert!(!all.is_named("evil.example:80"));
    }

    #[test]
    fn parameters_are_found_by_their_whole_name() {
        assert_eq!(parameter("/ask?token=a&lane=b/c", "lane"), Some("b/c"));
        assert_eq!(parameter("/ask?token=a&planet=b", "lane"), None);
        assert_eq!(parameter("/ask", "lane"), None);
    }
}
