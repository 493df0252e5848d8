# The commands of `.ci/run`, one by one. `just ci` runs that script itself, so what counts stands in one place.

# All that CI runs
ci:
    .ci/run

# Formatting, checked and not changed
fmt:
    cargo fmt --all --check

# Lints, warnings denied
clippy:
    cargo clippy --workspace --all-targets --locked -- -D warnings

# The documentation, warnings denied
doc:
    RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked

# Every test
test:
    cargo test --workspace --locked
