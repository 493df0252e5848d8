# Foretell in a container: `docker build -t foretell . && docker run --rm foretell plan --model gpt2 --topology dgx-h100`

FROM rust:1.95-slim-trixie AS build
WORKDIR /foretell
COPY . .
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/foretell/target \
    cargo build --profile dist --features tokenizers --locked && cp target/dist/foretell /usr/local/bin/foretell

FROM debian:trixie-slim
COPY --from=build /usr/local/bin/foretell /usr/local/bin/foretell
COPY LICENSE-MIT LICENSE-APACHE /usr/share/doc/foretell/
RUN useradd --create-home foretell
USER foretell
WORKDIR /home/foretell
ENTRYPOINT ["foretell"]
