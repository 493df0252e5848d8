//! Whom the server answers: requests that name it as their host and have its token, and that come
//! from its own page if they ask for work.

use crate::failure::{Failure, code};
use std::net::SocketAddr;
use tiny_http::{Header, Request, Response};

/// An answer to a request.
pub type Page = Response<std::io::Cursor<Vec<u8>>>;

/// Why a request is not answered: the status, and a sentence.
pub type Refused = (u16, &'static str);

/// What a request must have.
pub struct Door {
    /// The names of this server. A page elsewhere that has its own name lead here has another.
    hosts: [String; 2],
    token: String,
}

impl Door {
    /// The door of a server that listens on an address, with a token of its own.
    pub fn new(bound: SocketAddr) -> Result<Self, Failure> {
        Ok(Self { hosts: [format!("{bound}"), format!("localhost:{}", bound.port())], token: random_letters()? })
    }

    /// The address that opens the door.
    pub fn url(&self) -> String {
        format!("http://{}/?token={}", self.hosts[0], self.token)
    }

    /// Refuses a request for another host, and one without the token.
    pub fn admit(&self, request: &Request) -> Result<(), Refused> {
        let host = header(request, "Host");
        if !host.is_some_and(|host| self.hosts.iter().any(|known| known == host)) {
            return Err((403, "the request is not for this server"));
        }
        let given = parameter(request.url(), "token").unwrap_or_default();
        if !is_equal(given.as_bytes(), self.token.as_bytes()) {
            return Err((403, "use the address that `foretell serve` printed, with its token"));
        }
        Ok(())
    }

    /// Refuses a request that another site's page makes. Browsers say where a request comes from.
    pub fn admit_from_own_page(&self, request: &Request) -> Result<(), Refused> {
        let origin = header(request, "Origin").and_then(|origin| origin.strip_prefix("http://"));
        let site = header(request, "Sec-Fetch-Site");
        let is_own = origin.is_some_and(|origin| self.hosts.iter().any(|known| known == origin));
        match is_own && site.is_none_or(|site| site == "same-origin") {
            true => Ok(()),
            false => Err((403, "only the page of this server may ask")),
        }
    }
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

/// Compares without telling by its duration how much is equal.
fn is_equal(one: &[u8], other: &[u8]) -> bool {
    one.len() == other.len() && one.iter().zip(other).fold(0, |different, (a, b)| different | (a ^ b)) == 0
}

/// An answer of plain text.
pub fn plain(status: u16, text: &str) -> Page {
    with_headers(Response::from_string(text).with_status_code(status), &[("Content-Type", "text/plain; charset=utf-8")])
}

/// Adds headers, and those that every answer has.
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
    fn parameters_are_found_by_their_whole_name() {
        assert_eq!(parameter("/ask?token=a&lane=b/c", "lane"), Some("b/c"));
        assert_eq!(parameter("/ask?token=a&planet=b", "lane"), None);
        assert_eq!(parameter("/ask", "lane"), None);
    }
}
