//! The rollout engine: how many sequences it holds, and how long it generates.
//!
//! A roofline model: in each token step, every running sequence gains one token. The step takes the
//! time to read the weights and the cached keys and values of these sequences, or the time of its
//! products, whichever is longer. Tensor parallelism adds two all-reduces per layer, and the host
//! adds a fixed overhead. When a sequence ends, a waiting one starts (continuous batching; Yu et
//! al. 2022, "Orca"). The longest response ends the phase.
//!
//! It must not know frameworks or training.

use super::token_work::TokenWork;
use crate::gpu::{Cluster, NodeSpread, ProductFormat};
use crate::lengths::Lengths;
use foretell_program::{Collective, Rollout};
use foretell_units::{Bytes, Seconds};

/// Time of a token step outside of kernels: scheduling, sampling, reading results back, and passing
/// them on. vLLM's authors found 38 % of the time in kernels, with Llama-3 8B on an H100 ("vLLM
/// v0.6.0", September 2024). Reading its weights takes the kernels 5.3 ms, so the rest is 9 ms.
/// Scheduling is 4 ms of these 9 ms; the rows of `rl.csv` that are not held out fit better with all
/// 9 ms.
pub const STEP_OVERHEAD: Seconds = Seconds::new(9e-3);

/// Ratio of the time of an all-reduce to NCCL's, for an engine that spans nodes. There, engines
/// launch it from the host, while within nodes they use their own kernels. Chosen on the rows of
/// `rl.csv` that are not held out (NeMo RL 0.4: engines of 16 and 32 devices).
const BETWEEN_NODES: f64 = 4.0;

/// Number of tokens that an engine processes together: vLLM's `max_num_batched_tokens`.
const TOKENS_AT_ONCE: usize = 8192;

/// Elements of activations per token in an engine, over the features of a position: the residual,
/// its norm, queries, keys and values, and the two inner products of the feed-forward network.
const FEATURES_OF_TOKEN: usize = 12;

/// Bytes of an element: engines cache and communicate bf16 or fp16.
const ELEMENT: f64 = 2.0;

/// A rollout engine on some devices of a cluster.
#[derive(Clone, Debug)]
pub struct Engine {
    work: TokenWork,
    cluster: Cluster,
    format: ProductFormat,
    /// Bytes per weight: two, or one in eight bits.
    weight: f64,
    /// How its devices are spread over nodes.
    spread: NodeSpread,
    /// Memory that it uses on each device, in bytes.
    memory: f64,
    concurrency: usize,
    prompt: f64,
    samples: usize,
}

/// The generation phase of an engine in a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Generation {
    /// From the first prompt to the end of the longest response.
    pub duration: Seconds,
    /// The part of `duration` for the prompts' forward passes.
    pub prefill: Seconds,
    /// Largest number of sequences generated together.
    pub concurrent: usize,
    /// Number of sequences generated together, averaged over time.
    pub mean_concurrent: f64,
}

impl Engine {
    /// The engine of a rollout. It computes in `format`, the format of the actor's products, but in
    /// bf16 if that is wider than 16 bits. Its devices are consecutive, and the first is the first
    /// of a node.
    pub fn new(work: TokenWork, rollout: &Rollout, format: ProductFormat, cluster: &Cluster) -> Self {
        let format = if format.bytes() > ELEMENT { ProductFormat::Bf16 } else { format };
        Self {
            work,
            format,
            weight: format.bytes(),
            spread: NodeSpread::of_devices(0..rollout.tensor, cluster),
            memory: rollout.memory_share * cluster.gpu.memory.value(),
            cluster: cluster.clone(),
            concurrency: rollout.concurrency,
            prompt: rollout.prompt as f64,
            samples: rollout.samples,
        }
    }

    fn devices(&self) -> f64 {
        self.spread.members as f64
    }

    /// Bytes of weights on each device.
    pub fn weights(&self) -> Bytes {
        Bytes::new((self.weight * self.work.parameters / self.devices()) as u64)
    }

    /// Bytes per device for one pass over 8,192 tokens, and for the logits of all sequences in
    /// single precision.
    pub fn workspace(&self) -> Bytes {
        let activations = ELEMENT * (TOKENS_AT_ONCE * FEATURES_OF_TOKEN * self.work.hidden) as f64;
        Bytes::new((activations + 4.0 * (self.concurrency * self.work.vocabulary) as f64) as u64)
    }

    /// Bytes of a token's keys and values on each device.
    fn cached_token(&self) -> f64 {
        ELEMENT * self.work.cached / self.devices().min(self.work.cache_heads as f64)
    }

    /// Number of tokens for whose keys and values an engine has memory.
    pub fn cached_tokens(&self) -> f64 {
        let left = self.memory - self.weights().value() - self.workspace().value();
        (left / self.cached_token()).max(0.0)
    }

    /// The memory that it uses on each device.
    pub fn memory(&self) -> Bytes {
        Bytes::new(self.memory as u64)
    }

    /// The least memory per device with which the engine can hold one sequence of `longest` tokens.
    pub fn least_memory(&self, longest: usize) -> Bytes {
        self.weights() + self.workspace() + Bytes::new((self.cached_token() * longest as f64) as u64)
    }

    /// Time of a token step of `sequences` sequences that have `context` tokens in total.
    pub fn token_step(&self, sequences: f64, context: f64) -> Seconds {
        let (fixed, of_context) = self.token_step_parts(sequences);
        Seconds::new(fixed + of_context * context)
    }

    /// The seconds of a token step without its context, and the seconds per token of context.
    fn token_step_parts(&self, sequences: f64) -> (f64, f64) {
        let gpu = &self.cluster.gpu;
        let bandwidth = gpu.memory_bandwidth.value() * gpu.memory_efficiency;
        let weights = self.weight * self.work.read_by(sequences) / self.devices() / bandwidth;
        let products = self.work.product_flops() * sequences / self.devices() / self.product_rate();
        let cache = self.cached_token() / bandwidth;
        let scores = self.work.score_flops / self.devices() / self.product_rate();
        let exchange = self.all_reduce(sequences);
        (weights.max(products) + 2.0 * self.work.layers as f64 * exchange + STEP_OVERHEAD.value(), cache.max(scores))
    }

    /// The seconds of an all-reduce of the features of `tokens` tokens.
    fn all_reduce(&self, tokens: f64) -> f64 {
        let bytes = ELEMENT * tokens * self.work.hidden as f64;
        let factor = if self.spread.nodes > 1 { BETWEEN_NODES } else { 1.0 };
        self.spread.time(Collective::AllReduce, bytes, &self.cluster).value() * factor
    }

    /// Floating-point operations per second of large products on a device.
    fn product_rate(&self) -> f64 {
        self.cluster.gpu.peak(self.format).value() * self.cluster.gpu.product_efficiency(self.format)
    }

    /// The seconds of the forward pass over the prompts of `responses` responses. All responses to
    /// a prompt share its forward pass.
    fn prefill(&self, responses: usize) -> f64 {
        let tokens = self.prompt * responses.div_ceil(self.samples) as f64;
        let flops = self.work.product_flops() + self.work.score_flops * self.prompt / 2.0;
        let exchange = self.all_reduce(TOKENS_AT_ONCE as f64);
        let exchanges = 2.0 * self.work.layers as f64 * tokens / TOKENS_AT_ONCE as f64;
        tokens * flops / self.devices() / self.product_rate() + exchanges * exchange
    }

    /// Number of sequences generated together: as many as the cache has room for, with prompt and
    /// mean response, but at most the engine's concurrency.
    pub fn concurrent(&self, lengths: &Lengths) -> usize {
        (self.cached_tokens() / (self.prompt + lengths.mean())).floor().min(self.concurrency as f64) as usize
    }

    /// The time in which an engine generates `responses` of the `total` responses of a step. `None`
    /// if it has no memory for a sequence, or there are no responses.
    pub fn generate(&self, lengths: &Lengths, responses: usize, total: usize) -> Option<Generation> {
        let most = self.concurrent(lengths);
        if most == 0 || responses == 0 {
            return None;
        }
        let mut waiting = lengths.of_engine(responses, total).into_iter();
        // The token step, counted from the start of the phase, at which each running sequence ends.
        // Descending, so the next to end is last.
        let mut running: Vec<f64> = waiting.by_ref().take(most).collect();
        let order = |left: &f64, right: &f64| right.total_cmp(left);
        running.sort_by(order);
        let (mut passed, mut seconds, mut sequence_seconds) = (0.0f64, 0.0f64, 0.0f64);
        let mut context = self.prompt * running.len() as f64;
        let concurrent = running.len();
        // End and start, in token steps, of each sequence that was started later.
        let mut begun: Vec<(f64, f64)> = Vec::new();
        while let Some(&next) = running.last() {
            let (steps, sequences) = ((next - passed).max(0.0), running.len() as f64);
            let (fixed, of_context) = self.token_step_parts(sequences);
            // In each step, the context grows by one token per sequence.
            let taken = steps * fixed + of_context * (steps * context + sequences * steps * (steps + 1.0) / 2.0);
            seconds += taken;
            sequence_seconds += taken * sequences;
            context += sequences * steps;
            passed = next;
            running.pop();
            // When a sequence that started at `from` ends, its prompt and response leave the
            // context.
            let from = begun.iter().position(|(end, _)| *end == next).map(|index| begun.swap_remove(index).1);
            context -= self.prompt + next - from.unwrap_or(0.0);
            if let Some(length) = waiting.next() {
                let end = passed + length;
                begun.push((end, passed));
                context += self.prompt;
                let place = running.partition_point(|other| *other > end);
                running.insert(place, end);
            }
        }
        let prefill = self.prefill(responses);
        Some(Generation {
            duration: Seconds::new(seconds + prefill),
            prefill: Seconds::new(prefill),
            concurrent,
            mean_concurrent: if seconds > 0.0 { sequence_seconds / seconds } else { 0.0 },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::Profiles;
    use foretell_models::Model;

    fn engine(change: impl Fn(&mut Rollout)) -> Engine {
        let work = TokenWork::of(&Model::named("llama3-8b").expect("in the zoo")).expect("sound");
        let cluster = Profiles::library().expect("sound").cluster("h100-sxm-80g", None, 8, 16, None).expect("known");
        let mut rollout = Rollout::new([64, 8], [512, 1024, 4096]);
        change(&mut rollout);
        Engine::new(work, &rollout, ProductFormat::Bf16, &cluster)
    }

    #[test]
    fn a_token_step_is_what_the_roofline_says() {
        let engine = engine(|_| ());
        // One H100: 3.35 TB/s, of which streaming kernels reach 85 %. 7.505e9 parameters are read
        // in two bytes each, and 2 x 32 layers x 1024 features of each of 8 x 1000 tokens.
        let weights: f64 = 2.0 * (8_030_261_248.0 - 525_336_576.0) / (0.85 * 3.35e12);
        let cache: f64 = 2.0 * 65_536.0 * 8_000.0 / (0.85 * 3.35e12);
        let expected = weights + cache + 9e-3;
        let found = engine.token_step(8.0, 8_000.0).value();
        assert!((found / expected - 1.0).abs() < 1e-3, "{found} beside {expected}");
        // 2,048 sequences: products bind, at 70 % of 989 TFLOP/s.
        let products = 2.0 * 7.505e9 * 2048.0 / (0.70 * 989.4e12);
        let found = engine.token_step(2048.0, 0.0).value() - 9e-3;
        assert!((found / products - 1.0).abs() < 1e-2, "{found} beside {products}");
    }

    #[test]
    fn responses_of_one_length_take_a_token_step_each() {
        let engine = engine(|rollout| (rollout.response, rollout.response_max) = (256, 256));
        let lengths = Lengths::of(&Rollout::new([64, 8], [512, 256, 256]));
        let found = engine.generate(&lengths, 16, 16).expect("it fits");
        let steps: f64 = (1..=256).map(|token| engine.token_step(16.0, 16.0 * (512 + token) as f64).value()).sum();
        let decoding = (found.duration - found.prefill).value();
        assert!((decoding / steps - 1.0).abs() < 1e-2, "{decoding} beside {steps}");
        assert_eq!(found.concurrent, 16);
    }

    #[test]
    fn waves_of_responses_take_a_wave_each() {
        let lengths = Lengths::of(&Rollout::new([64, 8], [512, 256, 256]));
        let at_once = |concurrency| {
            let engine = engine(|rollout| rollout.concurrency = concurrency);
            let found = engine.generate(&lengths, 64, 64).expect("it fits");
            (found.duration - found.prefill).value()
        };
        let one_wave = engine(|_| ()).generate(&lengths, 16, 16).expect("it fits");
        let ratio = at_once(16) / (one_wave.duration - one_wave.prefill).value();
        assert!((ratio - 4.0).abs() < 0.02, "{ratio}");
        assert!(at_once(64) < 0.5 * at_once(16));
    }

    #[test]
    fn more_memory_holds_more_sequences_and_is_not_slower() {
        let lengths = Lengths::of(&Rollout::new([64, 8], [512, 4096, 16_384]));
        let mut before = (0, f64::INFINITY);
        for share in [0.32, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9] {
            let engine = engine(|rollout| rollout.memory_share = share);
            let found = engine.generate(&lengths, 512, 4096).expect("it fits");
            assert!(found.concurrent >= before.0 && found.duration.value() <= before.1 * 1.001, "{share}: {found:?}, {before:?}");
            before = (found.concurrent, found.duration.value());
        }
        // 60 GB of keys and values, 128 KiB a token, 4,608 tokens a sequence.
        assert!((95..105).contains(&before.0), "{before:?}");
        assert!(engine(|rollout| rollout.memory_share = 0.2).generate(&lengths, 512, 4096).is_none());
    }

    #[test]
    fn the_longest_response_ends_the_phase() {
        let lengths = |most| Lengths::of(&Rollout { response_p95: Some(2000), ..Rollout::new([64, 8], [512, 1024, most]) });
        let engine = engine(|_| ());
        let short = engine.generate(&lengths(2000), 64, 64).expect("it fits");
        let long = engine.generate(&lengths(16_384), 64, 64).expect("it fits");
        assert!(long.duration > short.duration * 1.2);
        assert!(long.mean_concurrent < short.mean_concurrent);
        // The same mean, and more responses elsewhere: the longest of them is waited for.
        let elsewhere = engine.generate(&lengths(16_384), 64, 64 * 64).expect("it fits");
        assert!(elsewhere.duration > long.duration);
    }

    #[test]
    fn tensor_parallelism_holds_more_and_steps_faster() {
        let [one, four] = [1, 4].map(|tensor| engine(|rollout| rollout.tensor = tensor));
        assert!(four.cached_tokens() > 4.0 * one.cached_tokens());
        assert!(four.token_step(8.0, 8_000.0) < one.token_step(8.0, 8_000.0));
        let over_nodes = engine(|rollout| rollout.tensor = 16);
        assert!(over_nodes.token_step(256.0, 0.0) > four.token_step(256.0, 0.0));
    }
}
