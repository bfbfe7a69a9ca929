// Light or dark: what the system prefers, until the switch says otherwise; remembered where the browser allows it.

const THEME = "opforge-theme";

function remembered() {
  try {
    return localStorage.getItem(THEME);
  } catch {
    return null;
  }
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function switchTheme() {
  const chosen = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = chosen;
  try {
    localStorage.setItem(THEME, chosen);
  } catch {
    // a file that may not remember: the switch works all the same
  }
  nameSwitch();
}

function nameSwitch() {
  const button = document.getElementById("theme");
  if (button) button.textContent = isDark() ? "☀ light" : "☾ dark";
}

function themeSwitch() {
  const chosen = remembered();
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
  return make("button", { type: "button", id: "theme", title: "light or dark (t)", on: { click: switchTheme } });
}
