//! Ranks, what they told each other, and what can happen next.

use std::ops::Range;

use super::disk::{Disk, Manifest, RANK_FILES, TABLE};
use crate::checkpoint::commit::machine::{Action, Event, Folder, Machine, Outcome, Shape, Word};

/// A change of the production order, to see whether the checks notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mutation {
    None,
    /// This action is left out and counts as done.
    Drop(Action),
    /// The first is done after the second.
    Swap(Action, Action),
}

/// What is explored.
#[derive(Debug, Clone, Copy)]
pub struct Config {
    /// Ranks of the job.
    pub ranks: u8,
    /// A second job, of one rank, that saves the same step in the same folder.
    pub rival: bool,
    pub overwrite: bool,
    /// The ranks' states differ.
    pub differ: bool,
    /// Chunks lie in an earlier step, which another process is about to remove.
    pub refers: bool,
    /// Crashes, errors, lost messages and early deadlines in one run.
    pub faults: u8,
    pub mutation: Mutation,
    /// The only rank that the mutation changes; none for all.
    pub mutated: Option<u8>,
}

impl Config {
    /// The mutation of a rank.
    pub fn mutation_of(&self, rank: u8) -> Mutation {
        if self.mutated.is_none_or(|r| r == rank) { self.mutation } else { Mutation::None }
    }
}

/// A message in the room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Message<T> {
    #[default]
    Unsent,
    OnItsWay(T),
    There(T),
    Lost,
}

impl<T: Copy> Message<T> {
    pub fn there(self) -> Option<T> {
        if let Self::There(value) = self { Some(value) } else { None }
    }
}

/// A rank.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Rank {
    pub machine: Machine,
    pub pending: Action,
    /// A mutation's action that comes after the pending one, and the event that waits for it.
    after: Option<Action>,
    resume: Option<Event>,
    pub id: u8,
    pub attempt: u8,
    pub alive: bool,
    /// Its part cannot be used.
    pub trouble: bool,
    /// It holds the parts of all ranks.
    pub gathered: bool,
    /// The manifest it means to replace.
    pub seen: Option<Manifest>,
}

impl Rank {
    pub fn outcome(&self) -> Option<Outcome> {
        match self.pending {
            Action::Finish(outcome) => Some(outcome),
            _ => None,
        }
    }

    pub fn ended(&self) -> bool {
        !self.alive || self.outcome().is_some()
    }

    fn set(&mut self, action: Action, mutation: Mutation) {
        self.pending = action;
        match mutation {
            Mutation::Drop(dropped) if dropped == action => self.answer(Event::Done, mutation),
            Mutation::Swap(first, second) if first == action => {
                let mut ahead = self.machine;
                if ahead.next(Event::Done) == second {
                    (self.machine, self.pending, self.after) = (ahead, second, Some(first));
                }
            }
            _ => {}
        }
    }

    /// The pending action ended so.
    pub fn answer(&mut self, event: Event, mutation: Mutation) {
        if let Some(first) = self.after.take() {
            (self.pending, self.resume) = (first, Some(event));
            return;
        }
        // Of the two the failure counts.
        let event = match self.resume.take() {
            Some(resumed) if !matches!(event, Event::Failed | Event::Differ) => resumed,
            _ => event,
        };
        if event == Event::Failed || event == Event::Unknown {
            self.trouble = true;
        }
        let next = self.machine.next(event);
        self.set(next, mutation);
    }
}

/// How an action goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum How {
    Well,
    /// An error without an effect.
    Error,
    /// An error after the effect, which is there now.
    ErrorAfter,
    /// No answer, and no effect.
    NoAnswer,
    /// No answer, but the effect.
    NoAnswerAfter,
    /// No answer, and the effect comes later.
    NoAnswerYet,
    /// A message that never arrives, and nobody is told.
    Lost,
    /// A message that arrives later.
    Late,
    /// The deadline comes first.
    Deadline,
}

/// Another process that prunes the step that the save refers to, as `retain::remove_steps` does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Prune {
    /// It looks which steps are referred to.
    Look,
    /// It deletes the manifest.
    Retract,
    /// It looks for marks.
    LookMarks,
    /// It looks at the manifests again.
    LookAgain,
    /// It deletes the data.
    Remove,
    /// It has ended, or found the step referred to.
    Ended,
}

/// Something that can happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Move {
    Run(usize, Action, How),
    /// A process is gone; `true` if its put is still on the way.
    Crash(usize, bool),
    Prune,
    Deliver,
    Land,
}

/// Everything at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct World {
    pub disk: Disk,
    pub ranks: Vec<Rank>,
    pub parts: [Message<bool>; 3],
    pub details: [Message<bool>; 3],
    pub verdict: Message<Word>,
    pub last: Message<Word>,
    /// A put on its way to the store, and what it replaces.
    pub landing: Option<(Manifest, Option<Manifest>)>,
    pub prune: Prune,
    pub faults_left: u8,
}

impl World {
    pub fn new(config: &Config) -> Self {
        let shape = |alone| Shape {
            files: RANK_FILES as u32,
            alone,
            overwrite: config.overwrite,
            delta: config.refers,
        };
        let rank = |id: u8, attempt: u8, alone: bool| {
            let machine = Machine::new(u32::from(id), shape(alone));
            let pending = Machine::start();
            Rank {
                machine,
                pending,
                after: None,
                resume: None,
                id,
                attempt,
                alive: true,
                trouble: false,
                gathered: alone,
                seen: None,
            }
        };
        let mut ranks: Vec<_> = (0..config.ranks).map(|r| rank(r, 1, config.ranks == 1)).collect();
        if config.rival {
            ranks.push(rank(0, 2, true));
        }
        for rank in &mut ranks {
            rank.set(rank.pending, config.mutation_of(rank.id));
        }
        Self {
            disk: Disk::new(config.overwrite),
            ranks,
            parts: Default::default(),
            details: Default::default(),
            verdict: Message::Unsent,
            last: Message::Unsent,
            landing: None,
            prune: if config.refers { Prune::Look } else { Prune::Ended },
            faults_left: config.faults,
        }
    }

    pub fn others(&self) -> impl Iterator<Item = &Rank> {
        self.ranks.iter().filter(|r| r.id > 0)
    }

    /// All that can happen next.
    pub fn moves(&self, out: &mut Vec<Move>) {
        out.clear();
        self.unforced(out);
        if self.faults_left == 0 {
            return;
        }
        for (i, rank) in self.ranks.iter().enumerate().filter(|(_, r)| !r.ended()) {
            let run = |how: &How| Move::Run(i, rank.pending, *how);
            let known = out.len();
            for step in faults_of(rank.pending).iter().map(run) {
                if !out[..known].contains(&step) {
                    out.push(step);
                }
            }
            out.push(Move::Crash(i, false));
            if rank.pending == Action::PutManifest && self.landing.is_none() {
                out.push(Move::Crash(i, true));
            }
        }
    }

    /// What can happen without a fault.
    pub fn unforced(&self, out: &mut Vec<Move>) {
        for (i, rank) in self.ranks.iter().enumerate().filter(|(_, r)| !r.ended()) {
            match self.ready(rank) {
                Ready::Yes => out.push(Move::Run(i, rank.pending, How::Well)),
                Ready::Never => out.push(Move::Run(i, rank.pending, How::Deadline)),
                Ready::NotYet => {}
            }
        }
        if self.on_the_way() {
            out.push(Move::Deliver);
        }
        if self.landing.is_some() {
            out.push(Move::Land);
        }
        if self.prune != Prune::Ended {
            out.push(Move::Prune);
        }
    }

    fn on_the_way(&self) -> bool {
        let late = |m: &Message<bool>| matches!(m, Message::OnItsWay(_));
        self.parts.iter().chain(&self.details).any(late)
            || [self.verdict, self.last].iter().any(|m| matches!(m, Message::OnItsWay(_)))
    }

    /// Whether a wait can end well.
    fn ready(&self, rank: &Rank) -> Ready {
        match rank.pending {
            Action::Gather => self.all_there(self.parts),
            Action::GatherDetails => self.all_there(self.details),
            Action::WaitVerdict => self.word_there(self.verdict),
            Action::WaitFinal => self.word_there(self.last),
            _ => Ready::Yes,
        }
    }

    fn all_there(&self, messages: [Message<bool>; 3]) -> Ready {
        let of = |r: &Rank| messages[r.id as usize];
        if self.others().all(|r| of(r).there().is_some()) {
            return Ready::Yes;
        }
        let never = |r: &Rank| match of(r) {
            Message::Lost => true,
            Message::Unsent => r.ended(),
            _ => false,
        };
        if self.others().any(never) { Ready::Never } else { Ready::NotYet }
    }

    fn word_there(&self, word: Message<Word>) -> Ready {
        match word {
            Message::There(_) => Ready::Yes,
            Message::Lost => Ready::Never,
            Message::Unsent if self.ranks[0].ended() => Ready::Never,
            _ => Ready::NotYet,
        }
    }
}

enum Ready {
    Yes,
    NotYet,
    Never,
}

/// What can go wrong with an action, each at the cost of a fault.
fn faults_of(action: Action) -> &'static [How] {
    use How::{Deadline, Error, ErrorAfter, Late, Lost, NoAnswer, NoAnswerAfter, NoAnswerYet};
    match action {
        Action::PutManifest => &[Error, ErrorAfter, NoAnswer, NoAnswerAfter, NoAnswerYet],
        Action::SendPart | Action::SendDetails | Action::Tell(_) => {
            &[Error, ErrorAfter, Lost, Late]
        }
        Action::Gather | Action::GatherDetails | Action::WaitVerdict | Action::WaitFinal => {
            &[Deadline]
        }
        Action::RemoveOwn | Action::Retire | Action::Hold => &[Error, ErrorAfter],
        Action::Judge | Action::LookEarly | Action::Ack | Action::Finish(_) => &[],
        _ => &[Error],
    }
}

/// The folder that an action makes durable, if it does.
pub fn synced(action: Action) -> Option<Folder> {
    match action {
        Action::SyncFolder(folder) => Some(folder),
        Action::Seal => Some(Folder::Step),
        _ => None,
    }
}

/// The file that an action writes or syncs.
pub fn file_of(action: Action, rank: u8) -> usize {
    match action {
        Action::Write(i) | Action::Sync(i) => own_files(rank).start + i as usize,
        _ => TABLE,
    }
}

/// The data files of a rank.
pub fn own_files(rank: u8) -> Range<usize> {
    let start = rank as usize * RANK_FILES;
    start..start + RANK_FILES
}
