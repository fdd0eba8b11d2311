"use strict";
// Shows status.json, which is read again every second. Text goes in as text only, never as markup.

const PHASES = ["detect", "abort", "quorum", "resolve", "configure", "heal", "first_commit"];
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

const words = (name) => name.replace("_", " ");
const color = (cause) => `var(--${CAUSES.includes(cause) ? cause : "elsewhere"})`;
const short = (value) => (typeof value === "number" ? value.toLocaleString("en", { maximumSignificantDigits: 4 }) : String(value));
const clock = (wall) => new Date(wall * 1000).toLocaleTimeString("en-GB");

function span(seconds) {
  const whole = Math.floor(seconds);
  const two = (number) => String(number).padStart(2, "0");
  return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
}

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
  if (status.checkpoint !== null) found.push(["newest checkpoint", `step ${status.checkpoint.step.toLocaleString("en")}`]);
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
  fill("hosts", status.hosts.map((host) => {
    const row = make("div", host.is_here ? "host here" : "host");
    row.append(make("span", "", host.host, host.is_here ? `${host.agent}, this host` : host.agent));
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

function showTimeline(status, now) {
  const changes = status.changes;
  if (changes.length) {
    const first = changes[0].wall;
    const end = Math.max(now, changes[changes.length - 1].wall + 0.001);
    byId("timeline-range").textContent = `${clock(first)} to ${clock(end)}`;
    fill("timeline", changes.map((change, place) => {
      const until = place + 1 < changes.length ? changes[place + 1].wall : end;
      const bar = make("i", "", undefined, `generation ${change.generation}: ${change.cause}, ${(until - change.wall).toFixed(1)} s`);
      bar.style.flex = `${Math.max(until - change.wall, 0.001)} 1 0`;
      bar.style.background = color(change.kind);
      return bar;
    }));
  }
  const key = (name, value) => {
    const mark = make("i", "key");
    mark.style.background = value;
    const item = make("span", "item");
    item.append(mark, ` ${words(name)}`);
    return [item, " "];
  };
  const kinds = CAUSES.filter((cause) => changes.some((change) => change.kind === cause));
  fill("causes", kinds.flatMap((cause) => key(cause, color(cause))));
  const used = PHASES.filter((phase) => changes.some((change) => (change.phases_ms || {})[phase]));
  fill("phases", used.flatMap((phase) => key(phase, `var(--p${PHASES.indexOf(phase)})`)));
  const total = (change) => Object.values(change.phases_ms || {}).reduce((sum, ms) => sum + (ms || 0), 0);
  const longest = Math.max(...changes.map(total), 1);
  fill("changes", changes.slice(-20).reverse().map((change) => {
    const row = make("tr");
    const moves = ["left", "joined", "moved"].filter((what) => change[what]).map((what) => `${change[what]} ${what}`);
    if (change.layout_before) moves.push(`takes the layout ${nameLayout(change)}`);
    row.append(make("td", "", clock(change.wall)), make("td", "number", change.generation), make("td", "cause", change.cause),
      make("td", "", moves.join(", ")), make("td", "number", `${change.lost_s.toFixed(2)} s`));
    const cell = make("td", "phases");
    const stack = make("div", "stack");
    stack.style.width = `${(100 * total(change)) / longest}%`;
    PHASES.forEach((phase, place) => {
      const ms = (change.phases_ms || {})[phase];
      if (!ms) return;
      const bar = make("i", "", undefined, `${words(phase)}: ${ms.toFixed(1)} ms`);
      bar.style.flex = `${ms} 1 0`;
      bar.style.background = `var(--p${place})`;
      stack.append(bar);
    });
    cell.append(stack);
    row.append(cell);
    return row;
  }));
}

function showLoss(history) {
  const points = history.filter((point) => point[3] !== null);
  byId("loss-section").hidden = points.length < 2;
  if (points.length < 2) return;
  const [low, high] = [Math.min(...points.map((point) => point[3])), Math.max(...points.map((point) => point[3]))];
  const [first, last] = [points[0][1], points[points.length - 1][1]];
  byId("loss-range").textContent = `${short(low)} to ${short(high)}, steps ${first} to ${last}`;
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
  showTimeline(status, status.wall);
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
