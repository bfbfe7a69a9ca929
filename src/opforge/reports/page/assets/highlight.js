// Syntax highlighting of kernels: a small tokenizer for Python, C++ and CUDA. Unknown text stays as it is.

const PYTHON = "and as assert async await break class continue def del elif else except finally for from global if import in is lambda match nonlocal not or pass raise return try while with yield None True False self";
const CPP = "auto bool break case char class const constexpr continue default delete do double else enum extern false float for if inline int int64_t long namespace new nullptr private public return short signed size_t sizeof static static_cast struct switch template this true typename uint32_t uint64_t unsigned using virtual void while __global__ __device__ __host__ __shared__ __launch_bounds__ __restrict__";
const TOKENS = {
  python: /(?<comment>#.*)|(?<string>[rRbBfFuU]{0,2}(?:"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?))|(?<mark>@[\w.]+)|(?<number>\b\d[\w.]*)|(?<word>[A-Za-z_]\w*)/g,
  cpp: /(?<comment>\/\/.*|\/\*[^]*?(?:\*\/|$))|(?<string>"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?)|(?<mark>^[ \t]*#[ \t]*\w+)|(?<number>\b\d[\w.']*)|(?<word>[A-Za-z_]\w*)/gm,
};
const KEYWORDS = { python: new Set(PYTHON.split(" ")), cpp: new Set(CPP.split(" ")) };

function* tokens(text, language) {
  let end = 0;
  for (const match of text.matchAll(TOKENS[language])) {
    if (match.index > end) yield ["", text.slice(end, match.index)];
    end = match.index + match[0].length;
    yield [kindOf(match, text[end], language), match[0]];
  }
  if (end < text.length) yield ["", text.slice(end)];
}

function kindOf({ groups }, next, language) {
  const kind = Object.keys(groups).find((name) => groups[name] !== undefined);
  if (kind !== "word") return kind;
  if (KEYWORDS[language].has(groups.word)) return "keyword";
  return next === "(" ? "called" : "";
}

/** Return a source as an element with one row per line; a token over several lines is split at line ends. */
function sourceCode(text, file) {
  const language = /\.(cpp|cc|cxx|cu|cuh|h|hpp)$/.test(file) ? "cpp" : "python";
  const code = make("code", { class: "source" });
  let line = make("span", { class: "line" });
  for (const [kind, token] of tokens(text.replaceAll("\r\n", "\n"), language)) {
    token.split("\n").forEach((piece, at) => {
      if (at > 0) {
        code.append(line, "\n");
        line = make("span", { class: "line" });
      }
      if (piece) line.append(kind ? make("span", { class: `t-${kind}` }, piece) : piece);
    });
  }
  code.append(line);
  return make("pre", { tabindex: 0, "aria-label": "source of the kernel" }, code);
}
