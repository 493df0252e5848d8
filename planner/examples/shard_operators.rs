//! Times how long choosing a model's operator sharding takes:
//! `cargo run --release -p foretell-planner --example shard_operators -- resnet50 8 64`
//! (model, `tensor`, micro-batch).

use foretell_models::Model;
use foretell_planner::operator_sharding::{ShardingRequest, choose};
use foretell_program::{Layout, Plan};
use foretell_simulator::{CostModel, Oversubscription};
use foretell_topologies::Topology;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let name = arguments.next().unwrap_or_else(|| "resnet50".into());
    let mut number = |usual: usize| arguments.next().map_or(Ok(usual), |text| text.parse());
    let (tensor, micro_batch) = (number(8)?, number(64)?);
    let topology = Topology::library("dgx-a100-80g")?;
    let costs = CostModel::new(None, &topology);
    let model = Model::named(&name)?;
    let plan = Plan::new(Layout { tensor, micro_batch, ..Layout::default() }, micro_batch);
    let oversubscription = Oversubscription::Refused;
    let request =
        ShardingRequest { model: &model, name: &name, topology: &topology, costs: &costs, plan: &plan, oversubscription };
    for _ in 0..5 {
        let start = std::time::Instant::now();
        let sharding = choose(&request)?;
        let found = sharding.map_or_else(|| "nothing to choose".into(), |sharding| format!("{sharding:?}"));
        println!("{:?} {found}", start.elapsed());
    }
    Ok(())
}
