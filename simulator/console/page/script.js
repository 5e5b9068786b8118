// Requests the page repeatedly and replaces the parts that have changed, sends forms without leaving
// the page, and pauses. All HTML comes from the server's templates, which escape texts.
"use strict";

const often = 200; // milliseconds between two requests
const lists = ["instances", "shelf", "quota", "switches", "faults", "disk", "feed"];
const saidBy = text => { document.getElementById("said").textContent = text; };
const tokenOf = page => page.querySelector("[name=token]").value;
const focusable = item => [...item.querySelectorAll("a, button")];

function replace(old, item) {
	const focus = focusable(old).indexOf(document.activeElement);
	old.replaceWith(item);
	if (focus >= 0) focusable(item)[focus]?.focus();
}

// arrange makes the children of a list, which have ids, equal to the children of another list.
function arrange(list, wanted) {
	const ids = new Set([...wanted.children].map(item => item.id));
	for (const child of [...list.children]) if (!ids.has(child.id)) child.remove();
	let at = list.firstElementChild;
	for (const item of [...wanted.children]) {
		const old = document.getElementById(item.id);
		if (at && at === old) at = at.nextElementSibling;
		else if (old) list.insertBefore(old, at);
		if (!old) list.insertBefore(item, at);
		else if (!old.isEqualNode(item)) replace(old, item);
	}
}

let tag = "";
async function update() {
	const headers = {Accept: "text/html", "If-None-Match": tag};
	const answer = await fetch(location, {headers}), text = await answer.text();
	if (paused) return;
	if (answer.status !== 304) {
		const page = new DOMParser().parseFromString(text, "text/html");
		if (tokenOf(page) !== tokenOf(document)) location.reload(); // the simulator was restarted
		tag = answer.headers.get("ETag");
		for (const id of lists) {
			const list = document.getElementById(id);
			if (list) arrange(list, page.getElementById(id));
		}
	}
	document.body.dataset.live = "yes";
}

let paused = document.body.dataset.updated !== "true";
async function follow() {
	if (!paused) await update().catch(() => delete document.body.dataset.live);
	setTimeout(follow, often);
}
if ("updated" in document.body.dataset) follow();

document.getElementById("pause")?.addEventListener("click", event => {
	event.preventDefault();
	paused = !paused;
	event.target.textContent = paused ? "Continue" : "Pause";
	saidBy(paused ? "The page is paused." : "");
});

document.addEventListener("submit", async event => {
	const form = event.target;
	if (form.method !== "post") return;
	event.preventDefault();
	try {
		const answer = await fetch(form.action, {method: "POST", headers: {Accept: "text/plain"},
			body: new URLSearchParams(new FormData(form, event.submitter))});
		saidBy(await answer.text());
	} catch (error) {
		saidBy("The rack does not answer: " + error.message);
	}
});
