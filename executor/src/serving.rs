//! A rank that serves workers which go at their own pace: it runs a session for each worker, each
//! in its own thread, over one arena.
//!
//! Sessions run concurrently. Operations on the shared parameters take turns: a pull copies their
//! latest version, a push makes the next one. Only the order of these turns varies between runs, so
//! replaying a recorded order reproduces a run bit for bit. [`Versions`] has the rules of turns.
//! When a worker is lost its session ends, and the others continue.

use crate::arena::Arenas;
use crate::backend::Hyperparameters;
use crate::error::ExecutorError;
use crate::interpreter::{Interpreter, StepRequest};
use crate::member::Member;
use crate::samples::Samples;
use crate::transport::TransportError;
use foretell_program::{Effect, Pacing, Rank, Session, Turn, Versions};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The Programs of a session, by their index in its interpreter.
const SNAPSHOT: usize = 0;
const SEND: usize = 1;
const RECEIVE: usize = 2;
const ADD: usize = 3;
const UPDATE: usize = 4;

/// How often the steps that all workers have made are reported.
const REPORT_INTERVAL: Duration = Duration::from_millis(100);

/// The hyperparameters of a step and version, each counted from 0.
pub(crate) type HyperparametersOf<'a> = &'a (dyn Fn(usize, usize) -> Hyperparameters + Sync);

/// A command to a session.
#[derive(Clone, Debug)]
enum Command {
    /// Serve the worker in these steps, or until the launcher stops the run.
    Serve(Range<usize>),
    /// Send the worker the latest parameters once.
    SendParameters,
}

/// The sessions of a rank, and the channels on which they get commands and return results.
pub(crate) struct Sessions<'a> {
    commands: Vec<Sender<Command>>,
    results: Receiver<Result<(), ExecutorError>>,
    turns: &'a Turns,
}

impl Sessions<'_> {
    /// Serves all workers in `steps`. Calls `done` with each step that all workers have made, in
    /// order. Returns the end of `steps`, or an earlier one if the launcher stops the run.
    pub(crate) fn serve(
        &self,
        steps: Range<usize>,
        mut done: impl FnMut(usize) -> Result<(), ExecutorError>,
    ) -> Result<usize, ExecutorError> {
        self.turns.begin(steps.end);
        let mut next = steps.start;
        self.tell(&Command::Serve(steps));
        let (mut running, mut failed) = (self.commands.len(), None);
        while running > 0 {
            match self.results.recv_timeout(REPORT_INTERVAL) {
                Ok(result) => {
                    running -= 1;
                    self.note(result, &mut failed);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(failed.unwrap_or(ExecutorError::OtherStream)),
            }
            let made = self.turns.steps_of_all();
            (next..made).try_for_each(&mut done)?;
            next = made;
        }
        failed.map_or(Ok(next), Err)
    }

    /// Sends all workers the latest parameters once.
    pub(crate) fn send_parameters(&self) -> Result<(), ExecutorError> {
        self.tell(&Command::SendParameters);
        let mut failed = None;
        for result in self.results.iter().take(self.commands.len()) {
            self.note(result, &mut failed);
        }
        failed.map_or(Ok(()), Err)
    }

    fn tell(&self, command: &Command) {
        // A session that has ended has already sent its error to the results.
        self.commands.iter().for_each(|session| drop(session.send(command.clone())));
    }

    /// Keeps the first error, but replaces a mere consequence by its cause.
    fn note(&self, result: Result<(), ExecutorError>, failed: &mut Option<ExecutorError>) {
        if let Err(error) = result {
            self.turns.abort();
            let is_cause = failed.as_ref().is_none_or(|known| known.is_consequence() && !error.is_consequence());
            if is_cause {
                *failed = Some(error);
            }
        }
    }
}

/// Starts the sessions of a rank, calls `work` with them, and ends them.
pub(crate) fn with_sessions<Output>(
    (member, arenas): (&Member, &Arenas),
    (sessions, turns): (&[Session], &Turns),
    samples: &Arc<Samples>,
    hyperparameters: HyperparametersOf<'_>,
    work: impl FnOnce(&Sessions<'_>) -> Result<Output, ExecutorError>,
) -> Result<Output, ExecutorError> {
    std::thread::scope(|scope| {
        let (results, received) = channel();
        let mut commands = Vec::new();
        for (worker, session) in (0..).zip(sessions) {
            let (sender, receiver) = channel();
            let results = results.clone();
            let body = move || {
                let mut runner = SessionRunner::start(worker, session, (member, arenas), turns, samples, hyperparameters);
                let mut is_lost = false;
                for command in receiver {
                    let result = match &mut runner {
                        _ if is_lost => Ok(()),
                        Ok(runner) => runner.run(command),
                        Err(error) => Err(std::mem::replace(error, ExecutorError::OtherStream)),
                    };
                    // All peers of a session are ranks of its worker.
                    is_lost |= matches!(result, Err(ExecutorError::Transport(TransportError::PeerLost { .. })));
                    let result = if is_lost { Ok(()) } else { result };
                    if is_lost {
                        turns.leave(worker);
                    }
                    turns.end(worker);
                    if results.send(result).is_err() {
                        break;
                    }
                }
            };
            let thread = std::thread::Builder::new().name(format!("worker {worker}'s session")).spawn_scoped(scope, body);
            thread.map_err(|error| ExecutorError::system("start the thread of a session", error))?;
            commands.push(sender);
        }
        work(&Sessions { commands, results: received, turns })
    })
}

/// The thread of a session.
struct SessionRunner<'a> {
    worker: u32,
    interpreter: Interpreter,
    member: &'a Member,
    turns: &'a Turns,
    samples: &'a Arc<Samples>,
    hyperparameters: HyperparametersOf<'a>,
}

impl<'a> SessionRunner<'a> {
    fn start(
        worker: u32,
        session: &Session,
        (member, arenas): (&'a Member, &Arenas),
        turns: &'a Turns,
        samples: &'a Arc<Samples>,
        hyperparameters: HyperparametersOf<'a>,
    ) -> Result<Self, ExecutorError> {
        let programs = [&session.snapshot, &session.send, &session.receive, &session.add, &session.update];
        let transport = Arc::clone(&member.transport);
        let interpreter = Interpreter::start(&programs, Rank(member.rank.0), arenas, transport, Arc::clone(samples))?;
        interpreter.outlive_peers();
        Ok(Self { worker, interpreter, member, turns, samples, hyperparameters })
    }

    fn run(&mut self, command: Command) -> Result<(), ExecutorError> {
        match command {
            Command::Serve(steps) => {
                for step in steps {
                    if !self.member.gate.may_start(step)? {
                        break;
                    }
                    self.step(step)?;
                }
                Ok(())
            }
            Command::SendParameters => {
                // No session pushes while parameters are sent.
                self.program(SNAPSHOT, 0, 0)?;
                self.program(SEND, 0, 0)
            }
        }
    }

    fn step(&mut self, step: usize) -> Result<(), ExecutorError> {
        let turns = self.turns;
        turns.take(Turn::Pull(self.worker), |effects, version| self.effects(effects, step, version))?;
        self.program(SEND, step, 0)?;
        self.program(RECEIVE, step, 0)?;
        turns.take(Turn::Push(self.worker), |effects, version| self.effects(effects, step, version))
    }

    fn effects(&mut self, effects: &[Effect], step: usize, version: usize) -> Result<(), ExecutorError> {
        effects.iter().try_for_each(|effect| {
            let program = match effect {
                Effect::Snapshot => SNAPSHOT,
                Effect::Add => ADD,
                Effect::Update => UPDATE,
            };
            self.program(program, step, version)
        })
    }

    fn program(&mut self, program: usize, step: usize, version: usize) -> Result<(), ExecutorError> {
        let hyperparameters = (self.hyperparameters)(step, version);
        let samples = Arc::clone(self.samples);
        self.interpreter.run(StepRequest { program, samples, next: None, hyperparameters, is_timed: false })
    }
}

/// The turns of a rank's sessions.
pub(crate) struct Turns {
    state: Mutex<TurnState>,
    changed: Condvar,
}

struct TurnState {
    versions: Versions,
    /// The version before the run.
    first_version: usize,
    /// The number of steps before the run.
    first: usize,
    /// The number of steps that each worker has made since.
    steps: Vec<usize>,
    /// The workers that have left.
    left: Vec<bool>,
    /// The turns taken, in order.
    taken: Vec<Turn>,
    /// The turns to replay; `None` if turns are taken as they come.
    replay: Option<VecDeque<Turn>>,
    /// The number of steps after `first` that a worker makes before it waits for the other workers.
    end: usize,
    /// The number of pushes of each staleness, without those after the first worker reached `end`.
    staleness: Vec<u64>,
    /// The workers whose sessions have nothing to do.
    idle: Vec<bool>,
    aborted: bool,
}

impl Turns {
    /// The turns of a run that starts after `first` steps; in the order `replay`, if there is one.
    pub(crate) fn new(pacing: Pacing, first: usize, replay: Option<Vec<Turn>>) -> Self {
        let state = TurnState {
            versions: Versions::new(pacing),
            first_version: pacing.updates_in(first),
            first,
            steps: vec![0; pacing.workers],
            left: vec![false; pacing.workers],
            taken: Vec::new(),
            replay: replay.map(VecDeque::from),
            end: usize::MAX,
            staleness: Vec::new(),
            idle: vec![true; pacing.workers],
            aborted: false,
        };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Waits for a turn and takes it; no other turn runs meanwhile. `act` gets the turn's effects
    /// and the latest version.
    ///
    /// # Errors
    /// The error of `act`; [`ExecutorError::OtherStream`] after another session failed;
    /// [`ExecutorError::Unsupported`] if the order to replay belongs to another run.
    fn take(&self, turn: Turn, act: impl FnOnce(&[Effect], usize) -> Result<(), ExecutorError>) -> Result<(), ExecutorError> {
        let mut state = self.lock();
        loop {
            if state.aborted {
                return Err(ExecutorError::OtherStream);
            }
            let (next, is_allowed) = (state.next(), state.versions.allows(turn));
            match next {
                Some(next) if next.is_none_or(|next| state.is_idle(next)) => return Err(other_order()),
                Some(Some(next)) if next == turn && !is_allowed => return Err(other_order()),
                Some(Some(next)) if next != turn => {}
                _ if is_allowed => break,
                _ => {}
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        act(state.versions.effects(turn), state.first_version + state.versions.version())?;
        state.replay.as_mut().map(VecDeque::pop_front);
        state.taken.push(turn);
        let all_are_at_work = state.present_steps().all(|steps| steps < state.end);
        if let Some(staleness) = state.versions.take(turn)
            && all_are_at_work
        {
            let known = state.staleness.len().max(staleness + 1);
            state.staleness.resize(known, 0);
            state.staleness[staleness] += 1;
        }
        if let Turn::Push(worker) = turn {
            state.steps[worker as usize] += 1;
        }
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// Notes that all sessions have work up to the step `end`.
    fn begin(&self, end: usize) {
        let mut state = self.lock();
        state.idle.iter_mut().for_each(|idle| *idle = false);
        let steps = end.saturating_sub(state.first);
        state.end = steps;
        state.versions.end_after(steps);
    }

    /// Notes that a session has no more work.
    fn end(&self, worker: u32) {
        self.lock().idle[worker as usize] = true;
        self.changed.notify_all();
    }

    /// Notes that a worker is lost: no turn waits for it any more.
    fn leave(&self, worker: u32) {
        let mut state = self.lock();
        state.versions.leave(worker);
        state.left[worker as usize] = true;
        drop(state);
        self.changed.notify_all();
    }

    /// Makes all turns fail.
    fn abort(&self) {
        self.lock().aborted = true;
        self.changed.notify_all();
    }

    /// The number of steps that all remaining workers have made, including those before the run.
    fn steps_of_all(&self) -> usize {
        self.lock().steps_of_all()
    }

    /// The turns taken, and the number of pushes of each staleness.
    pub(crate) fn record(self) -> (Vec<Turn>, Vec<u64>) {
        let state = self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        (state.taken, state.staleness)
    }

    fn lock(&self) -> MutexGuard<'_, TurnState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TurnState {
    /// The next turn to replay: `Some(None)` after the last one, `None` if no order is replayed.
    fn next(&self) -> Option<Option<Turn>> {
        self.replay.as_ref().map(|turns| turns.front().copied())
    }

    fn is_idle(&self, turn: Turn) -> bool {
        let (Turn::Pull(worker) | Turn::Push(worker)) = turn;
        self.idle.get(worker as usize).copied().unwrap_or(true)
    }

    /// The steps after `first` of each worker that has not left.
    fn present_steps(&self) -> impl Iterator<Item = usize> {
        let present = self.steps.iter().zip(&self.left).filter(|&(_, &has_left)| !has_left);
        present.map(|(&steps, _)| steps)
    }

    fn steps_of_all(&self) -> usize {
        self.first + self.present_steps().min().unwrap_or(0)
    }
}

fn other_order() -> ExecutorError {
    ExecutorError::Unsupported {
        what: "replaying an order of arrivals of another run".into(),
        hint: "use the file that `--record-order` wrote for the same plan, `--steps`, evaluations and checkpoints".into(),
    }
}
