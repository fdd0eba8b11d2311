"use strict";
// Shows status.json, which is read again every second. Text goes in as text only, never as markup.

const PHASES = ["leave", "abort", "quorum", "resolve", "configure", "heal", "first_commit"];
const CAUSES = ["start", "join", "drain", "left", "killed", "failed", "hung", "agent_lost", "abort", "elsewhere", "under_way"];
const POLL_MS = 1000;
const byId = (id) => document.getElementById(id);

function make(tag, className, text, title) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  if (title) element.title = title;
  return element;
}

function fill(id, elements) {
  byId(id).replaceChildren(...elements);
}

const words = (name) => name.replaceAll("_", " ");
const color = (cause) => `var(--${CAUSES.includes(cause) ? cause : "elsewhere"})`;
const short = (value) => (typeof value === "number" ? value.toLocaleString("en", { maximumSignificantDigits: 4 }) : String(value));
const clock = (wall) => new Date(wall * 1000).toLocaleTimeString("en-GB");

function span(seconds) {
  const whole = Math.floor(seconds);
  const two = (number) => String(number).padStart(2, "0");
  return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
}

// An agent's name is that of its host, eight hexadecimal digits, and a number if it has joined again.
const hostName = (agent) => agent.replace(/-[0-9a-f]{8}([.][0-9]+)?$/, "");

const nameLayout = (event) => (event.fallback_of ? `${event.layout}, a fallback of ${event.fallback_of}` : event.layout);

function showTiles(status) {
  const found = [
    ["generation", status.generation],
    ["step", status.step.toLocaleString("en")],
    ["steps/s", status.steps_per_s.toFixed(2)],
    ["goodput", status.goodput === null ? "–" : `${(100 * status.goodput).toFixed(1)} %`],
    ["running for", span(status.elapsed_s)],
  ];
  if (status.tokens_per_s !== null) found.push(["tokens/s, this host", Math.round(status.tokens_per_s).toLocaleString("en")]);
  for (const [name, value] of Object.entries(status.numbers)) if (name !== "tokens") found.push([`${name}, this host`, short(value)]);
  const workers = Object.entries(status.data_workers_lost).filter(([, number]) => number);
  if (workers.length) found.push(["data workers lost, this host", workers.map(([kind, number]) => `${number} ${kind}`).join(", ")]);
  if (status.last_commit_age_s !== null) found.push(["since the last commit", `${status.last_commit_age_s.toFixed(1)} s`]);
  if (status.coordinator_away !== null) found.push(["without the coordinator", `${status.coordinator_away.away_s.toFixed(1)} s`]);
  if (status.checkpoint !== null) found.push(["newest checkpoint", `step ${status.checkpoint.step.toLocaleString("en")}`]);
  const sum = (name) => status.saving.reduce((total, save) => total + save[name], 0);
  if (status.saving.length) found.push(["of a checkpoint saved, this host", `${Math.floor((100 * sum("written_bytes")) / sum("bytes"))} %`]);
  fill("tiles", found.map(([name, value]) => {
    const tile = make("div", "tile");
    tile.append(make("b", "", value), make("span", "", name));
    tile.dataset.name = name;
    return tile;
  }));
}

function showSeats(status) {
  const counts = Object.entries(status.seats).filter(([, count]) => count);
  byId("seats-counts").textContent = counts.map(([name, count]) => `${count} ${name}`).join(", ");
  byId("layout").textContent = status.layout === null ? "" : `layout ${nameLayout(status)}`;
  byId("layout").className = status.fallback_of ? "fallback" : "";
  const healing = new Map(status.healing.map((heal) => [heal.local_rank, heal.received_bytes / heal.bytes]));
  const isLive = status.state === "running";
  const names = status.hosts.map((host) => hostName(host.agent));
  const isUnique = (name) => names.indexOf(name) === names.lastIndexOf(name);
  byId("hosts").style.setProperty("--ranks", Math.max(1, ...status.hosts.map((host) => host.seats.length)));
  fill("hosts", status.hosts.map((host, place) => {
    const row = make("div", host.is_here ? "host here" : "host");
    const name = isUnique(names[place]) ? names[place] : host.agent;
    const unreached = host.out_of_reach.length ? `, left out: it and ${host.out_of_reach.join(", ")} do not reach each other` : "";
    row.append(make("span", "", name, `${host.agent} at ${host.host}${host.is_here ? ", this host" : ""}${unreached}`));
    for (const seat of host.seats) {
      const isGone = isLive && host.is_here && seat.doing === undefined;
      const share = host.is_here && healing.has(seat.local_rank) ? `, heals: ${Math.round(100 * healing.get(seat.local_rank))} %` : "";
      const rank = seat.rank === null ? "no rank" : `rank ${seat.rank}`;
      const doing = isGone ? ", not running" : seat.doing === undefined ? "" : `, ${words(seat.doing.toLowerCase())}, step ${seat.step}`;
      row.append(make("i", `seat ${isGone ? "gone" : seat.status}`, seat.rank ?? "", `${rank}, local rank ${seat.local_rank}, ${seat.status}${doing}${share}`));
    }
    return row;
  }));
}

function showDevices(status) {
  fill("devices", status.device_faults.map((fault) => {
    const quarantined = fault.is_quarantined ? ", quarantined" : "";
    const uuid = fault.uuid && fault.uuid !== fault.device ? ` (${fault.uuid})` : "";
    return make("li", "", `device ${fault.device}${uuid} of this host: ${fault.num_faults} fault${fault.num_faults === 1 ? "" : "s"}${quarantined}: ${fault.reason}`);
  }));
}

function showLost(status) {
  const found = Object.entries(status.lost_s).sort((one, other) => other[1] - one[1]);
  const most = Math.max(...found.map(([, seconds]) => seconds), 1e-9);
  fill("lost", found.flatMap(([cause, seconds]) => {
    const bar = make("div", "bar");
    bar.style.width = `${(100 * seconds) / most}%`;
    bar.style.background = color(cause);
    const number = status.num_changes[cause];
    return [make("span", "", words(cause)), bar, make("span", "number", `${seconds.toFixed(2)} s${number ? `, ${number}×` : ""}`)];
  }));
}

// [phase, milliseconds]: the first commit follows a heal, but its time is counted from the same moment on.
function partsOf(change) {
  const ms = change.phases_ms || {};
  const after = { first_commit: Math.max(0, (ms.first_commit || 0) - (ms.heal || 0)) };
  return PHASES.map((phase) => [phase, phase in after ? after[phase] : ms[phase] || 0]);
}

const totalOf = (change) => partsOf(change).reduce((sum, [, ms]) => sum + ms, 0);
const duration = (ms) => (ms < 999.5 ? `${ms.toFixed(0)} ms` : `${(ms / 1000).toFixed(1)} s`);

function showTimeline(status) {
  const segments = [];
  let at = null;
  const add = (from, until, className, fill, title) => {
    if (at === null) at = from;
    for (const [end, name, background, text] of [[from, "training", "", "training"], [until, className, fill, title]]) {
      if (end <= at) continue;
      const bar = make("i", name, undefined, `${text}, ${(end - at).toFixed(1)} s`);
      bar.style.flex = `${end - at} 1 0`;
      if (background) bar.style.background = background;
      segments.push(bar);
      at = end;
    }
  };
  // The phases of a start are those of the ranks; the job begins with its agent.
  const beganAt = (change) => (change.kind === "start" ? status.wall - status.elapsed_s : change.wall - totalOf(change) / 1000);
  for (const change of status.changes) {
    add(beganAt(change), change.wall, "", color(change.kind), `change to generation ${change.generation}: ${change.cause}`);
  }
  if (status.changes.length) {
    const underWay = status.is_changing ? status.lost_s.under_way || 0 : 0;
    add(status.wall - underWay, status.wall, "", color("under_way"), "a change under way");
    fill("timeline", segments);
    fill("timeline-range", [make("span", "", clock(beganAt(status.changes[0]))), make("span", "", clock(at))]);
  }
  showCauses(status.changes, status.is_changing);
  showChanges(status.changes);
}

function key(name, background) {
  const mark = make("i", name === "training" ? "key training" : "key");
  if (background) mark.style.background = background;
  const item = make("span", "item");
  item.append(mark, ` ${words(name)}`);
  return [item, " "];
}

function showCauses(changes, isChanging) {
  const kinds = CAUSES.filter((cause) => changes.some((change) => change.kind === cause) || (isChanging && cause === "under_way"));
  fill("causes", [...key("training"), ...kinds.flatMap((cause) => key(cause, color(cause)))]);
  const used = PHASES.filter((phase) => changes.some((change) => (change.phases_ms || {})[phase]));
  fill("phases", used.flatMap((phase) => key(phase, `var(--p${PHASES.indexOf(phase)})`)));
}

function showChanges(changes) {
  const shown = changes.slice(-20).reverse();
  const usual = shown.filter((change) => change.kind !== "start"); // a start may take a hundred times as long
  const longest = Math.max(...(usual.length ? usual : shown).map(totalOf), 1);
  fill("changes", shown.map((change) => {
    const row = make("tr");
    const moves = ["left", "joined", "moved"].filter((what) => change[what]).map((what) => `${change[what]} ${what}`);
    if (change.layout_before) moves.push(`takes the layout ${nameLayout(change)}`);
    row.append(make("td", "", clock(change.wall)), make("td", "number", change.generation), make("td", "cause", change.cause),
      make("td", "", moves.join(", ")), make("td", "number", `${change.lost_s.toFixed(2)} s`));
    const share = totalOf(change) / longest;
    const stack = make("div", share > 1 ? "stack cut" : "stack");
    stack.style.width = `${100 * Math.min(share, 1)}%`;
    for (const [phase, ms] of partsOf(change)) {
      if (!ms) continue;
      const bar = make("i", "", undefined, `${words(phase)}: ${change.phases_ms[phase].toFixed(1)} ms`);
      bar.style.flex = `${ms} 1 0`;
      bar.style.background = `var(--p${PHASES.indexOf(phase)})`;
      stack.append(bar);
    }
    const bars = make("div");
    if (totalOf(change)) bars.append(stack, make("span", "number", duration(totalOf(change))));
    const cell = make("td", "phases");
    cell.append(bars);
    row.append(cell);
    return row;
  }));
}

function showLoss(history) {
  const points = history.filter((point) => point[3] !== null);
  byId("loss-section").hidden = points.length < 2;
  byId("lost-section").classList.toggle("wide", points.length < 2);
  if (points.length < 2) return;
  const [low, high] = [Math.min(...points.map((point) => point[3])), Math.max(...points.map((point) => point[3]))];
  const [first, last] = [points[0][1], points[points.length - 1][1]];
  fill("loss-values", [make("span", "", short(high)), make("span", "", short(low))]);
  fill("loss-steps", [make("span", "", `step ${first}`), make("span", "", `step ${last}`)]);
  const x = (point) => (1000 * (point[1] - first)) / Math.max(last - first, 1);
  const y = (point) => 155 - (150 * (point[3] - low)) / (high - low || 1);
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", points.map((point, place) => `${place ? "L" : "M"}${x(point).toFixed(1)} ${y(point).toFixed(1)}`).join(""));
  byId("loss").replaceChildren(path);
}

function show(found) {
  const status = found.status;
  document.title = `${status.job ?? "elasticgang"}: step ${status.step}`;
  byId("job").textContent = status.job ?? "a job that has not started";
  const state = status.state === "running" && status.is_changing ? "changing" : status.state;
  byId("state").textContent = state;
  byId("state").className = `badge ${state}`;
  byId("reason").textContent = status.reason;
  showTiles(status);
  showSeats(status);
  showDevices(status);
  showLost(status);
  showTimeline(status);
  showLoss(found.history);
}

async function poll() {
  try {
    const response = await fetch("status.json", { cache: "no-store" });
    if (!response.ok) throw new Error(`status ${response.status}`);
    show(await response.json());
  } catch (error) {
    byId("state").textContent = "unreachable";
    byId("state").className = "badge unreachable";
    byId("reason").textContent = "the job has ended, or its page cannot be reached; these are its last numbers";
  }
  setTimeout(poll, POLL_MS);
}

poll();
