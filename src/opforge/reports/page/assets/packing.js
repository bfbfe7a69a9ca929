// Cases and sources are unpacked on demand: base64, deflate, JSON.

let embedded = null;

/** Return the packed chunks of a name, from the end of the file or from the server. */
async function chunks(name) {
  if (!data.embedded) {
    const answer = await fetch(`blob/${encodeURIComponent(name)}`);
    return answer.ok ? answer.json() : [];
  }
  if (embedded === null) {
    if (document.readyState === "loading") await new Promise((go) => document.addEventListener("DOMContentLoaded", go, { once: true }));
    embedded = JSON.parse(document.getElementById("blobs").textContent);
  }
  return embedded[name] || [];
}

async function unpack(text) {
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

async function unpacked(name) {
  return Promise.all((await chunks(name)).map(unpack));
}

/** Return the cases of an operator as records. */
async function casesOf(unit) {
  return (await unpacked(`unit:${unit}`)).flat();
}
