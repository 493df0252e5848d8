# The commands of `.ci/run`, one by one.

# All that CI runs
ci:
    .ci/run

# Formatting, checked and not changed
fmt:
    cargo fmt --all --check

# Lints, warnings denied
clippy:
    cargo clippy --workspace --all-targets --all-features --locked -- -D warnings

# Licences, sources and duplicate versions of dependencies
deny:
    cargo deny check licenses bans sources

# API documentation, warnings denied
doc:
    RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --all-features --locked

# The book, into target/book
book:
    mdbook build docs

# Every test
test:
    cargo test --workspace --all-features --locked
