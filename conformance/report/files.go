package report

import (
	"bytes"
	"cmp"
	_ "embed"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"html"
	"html/template"
	"io"
	"maps"
	"math"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode"

	"github.com/santhosh-tekuri/jsonschema/v6"
)

const (
	jsonFile  = "report.json"
	junitFile = "junit.xml"
	pageFile  = "index.html"
)

// ErrNotWritten means that a file of the report is missing.
var ErrNotWritten = errors.New("the report is not complete")

// Write writes report.json, junit.xml and index.html into a new folder. It replaces every
// occurrence of the secrets, such as the token, with "[redacted]".
//
// Write writes even an inconsistent report, because it is the only record of the run. The error
// then says what is inconsistent.
func Write(dir string, r *Report, secrets ...string) error {
	clean := r.scrub(secrets)
	if err := MakeFolder(dir); err != nil {
		return errors.Join(ErrNotWritten, err)
	}
	var failed []error
	var wrong error
	for _, file := range []struct {
		name   string
		render func(*Report) ([]byte, error)
	}{{jsonFile, encode}, {junitFile, junit}, {pageFile, renderPage}} {
		content, err := file.render(clean)
		if err == nil {
			err = writeNew(filepath.Join(dir, file.name), content)
		}
		if err == nil && file.name == jsonFile {
			_, wrong = decode(content)
		}
		if err != nil {
			failed = append(failed, ErrNotWritten, fmt.Errorf("write %s: %w", file.name, err))
		}
	}
	if wrong != nil {
		failed = append(failed, fmt.Errorf("the report in %s: %w", dir, wrong))
	}
	return errors.Join(failed...)
}

func encode(r *Report) ([]byte, error) {
	var text bytes.Buffer
	encoder := json.NewEncoder(&text)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	err := encoder.Encode(r)
	return text.Bytes(), err
}

func writeNew(path string, content []byte) error {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	_, err = file.Write(content)
	return errors.Join(err, file.Close())
}

// MakeFolder makes the folder of a report. If the folder exists, MakeFolder fails, because files in
// it may be somebody else's.
func MakeFolder(dir string) error {
	err := os.MkdirAll(filepath.Dir(dir), 0o755)
	if err == nil {
		err = os.Mkdir(dir, 0o755)
	}
	if err != nil {
		return fmt.Errorf("make the folder of the report: %w; name one that does not exist with --report",
			err)
	}
	return nil
}

// maxBytes limits what Read loads into memory. A large report has a tenth of that.
const maxBytes = 256 << 20

//go:embed report.schema.json
var schemaText []byte

var compiledSchema = sync.OnceValues(func() (*jsonschema.Schema, error) {
	document, err := jsonschema.UnmarshalJSON(bytes.NewReader(schemaText))
	if err != nil {
		return nil, err
	}
	compiler := jsonschema.NewCompiler()
	compiler.AssertFormat()
	if err := compiler.AddResource("report.schema.json", document); err != nil {
		return nil, err
	}
	return compiler.Compile("report.schema.json")
})

// Read reads a report from path, which is its folder or its report.json. It accepts only a report
// that matches the schema and is consistent.
func Read(path string) (*Report, error) {
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		path = filepath.Join(path, jsonFile)
	}
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // else a FIFO would block
	if err != nil {
		return nil, fmt.Errorf("read a report: %w (expected a folder that oxide-conformance wrote, "+
			"or its %s)", err, jsonFile)
	}
	defer func() { _ = file.Close() }()
	text, err := io.ReadAll(io.LimitReader(file, maxBytes+1))
	if err != nil {
		return nil, fmt.Errorf("read a report: %w", err)
	}
	if len(text) > maxBytes {
		return nil, fmt.Errorf("%s is no report: it has more than %d MiB", path, maxBytes>>20)
	}
	r, err := decode(text)
	if err != nil {
		return nil, fmt.Errorf("%s is no report: %w", path, err)
	}
	return r, nil
}

func decode(text []byte) (*Report, error) {
	document, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
	if err != nil {
		return nil, fmt.Errorf("expected JSON: %w", err)
	}
	schema, err := compiledSchema()
	if err != nil {
		return nil, err
	}
	if object, ok := document.(map[string]any); ok {
		version, ok := object["schema"].(json.Number)
		if ok && version.String() != fmt.Sprint(SchemaVersion) {
			return nil, fmt.Errorf("it was written in schema %s, and this program reads schema %d: "+
				"use the oxide-conformance that wrote it", version, SchemaVersion)
		}
	}
	err = schema.Validate(document)
	if invalid, is := errors.AsType[*jsonschema.ValidationError](err); is {
		for len(invalid.Causes) > 0 {
			invalid = invalid.Causes[0]
		}
		unit := invalid.BasicOutput()
		err = fmt.Errorf("at %s: %s", cmp.Or(unit.InstanceLocation, "the report"), unit.Error)
	}
	if err != nil {
		return nil, err
	}
	var r Report
	if err := json.Unmarshal(text, &r); err != nil {
		return nil, err
	}
	if err := r.Check(); err != nil {
		return nil, fmt.Errorf("it does not add up: %w", err)
	}
	return &r, nil
}

const redacted = "[redacted]"

// Redactor returns a replacer that turns each secret into "[redacted]". It finds a secret
// unchanged; escaped for URLs, HTML and JSON; in hexadecimal digits; and in base64, alone or as a
// part of a longer text. It ignores a secret that consists of spaces.
func Redactor(secrets ...string) *strings.Replacer {
	var found []string
	for _, secret := range secrets {
		found = append(append(found, forms(secret)...), forms(strings.TrimSpace(secret))...)
	}
	slices.SortFunc(found, func(a, b string) int { return len(b) - len(a) }) // the longest match first
	var pairs []string
	for _, form := range found {
		pairs = append(pairs, form, redacted)
	}
	return strings.NewReplacer(pairs...)
}

func forms(secret string) []string {
	if strings.TrimSpace(secret) == "" {
		return nil
	}
	quoted, _ := json.Marshal(secret) // a string always marshals
	inString := string(quoted[1 : len(quoted)-1])
	raw := strings.NewReplacer(`\u003c`, "<", `\u003e`, ">", `\u0026`, "&").Replace(inString)
	hexadecimal := hex.EncodeToString([]byte(secret))
	all := []string{
		secret, html.EscapeString(secret), template.HTMLEscapeString(secret),
		inString, raw, hexadecimal, strings.ToUpper(hexadecimal),
	}
	for _, escaped := range []string{url.QueryEscape(secret), url.PathEscape(secret)} {
		all = append(all, escaped, escape.ReplaceAllStringFunc(escaped, strings.ToLower))
	}
	// Inside a longer base64 text a secret has three forms, one for each position modulo 3. Leave out
	// characters that depend on other bytes, and forms so short that they occur by chance.
	for _, encoding := range []*base64.Encoding{base64.StdEncoding, base64.URLEncoding} {
		all = append(all, encoding.EncodeToString([]byte(secret)))
		for before := range 3 {
			padded := strings.Repeat("\x00", before) + secret
			encoded := encoding.WithPadding(base64.NoPadding).EncodeToString([]byte(padded))
			first := (8*before + 5) / 6 // the first character that has only bits of the secret
			last := 8 * len(padded) / 6 // the first character after those
			if last-first >= 8 {
				all = append(all, encoded[first:last])
			}
		}
	}
	return all
}

var escape = regexp.MustCompile(`%[0-9A-F]{2}`)

// scrub returns a copy without secrets and without what Plain replaces. Slices and maps in the copy
// are not nil.
func (r *Report) scrub(secrets []string) *Report {
	replacer := Redactor(secrets...)
	clean := func(v reflect.Value) string { return Plain(replacer.Replace(v.String())) }
	scrubbed := copyOf(reflect.ValueOf(*r), clean).Interface().(Report)
	return &scrubbed
}

func copyOf(v reflect.Value, clean func(reflect.Value) string) reflect.Value {
	if v.Type() == reflect.TypeFor[time.Time]() {
		return v
	}
	result := reflect.New(v.Type()).Elem()
	switch v.Kind() {
	case reflect.String:
		result.SetString(clean(v))
	case reflect.Struct:
		for i := range v.NumField() {
			result.Field(i).Set(copyOf(v.Field(i), clean))
		}
	case reflect.Slice:
		result.Set(reflect.MakeSlice(v.Type(), v.Len(), v.Len()))
		for i := range v.Len() {
			result.Index(i).Set(copyOf(v.Index(i), clean))
		}
	case reflect.Map:
		result.Set(reflect.MakeMapWithSize(v.Type(), v.Len()))
		for key, value := range v.Seq2() {
			result.SetMapIndex(copyOf(key, clean), copyOf(value, clean))
		}
	default:
		return v
	}
	return result
}

// Plain replaces what a terminal or a page would interpret instead of showing it: control
// characters except line feeds and tabs; invisible marks, some of which change the direction of
// writing; and bytes that are not UTF-8. Texts of a rack may contain any of them.
func Plain(text string) string {
	return strings.Map(func(r rune) rune {
		if r != '\n' && r != '\t' && (unicode.IsControl(r) || unicode.Is(unicode.Cf, r) ||
			unicode.Is(unicode.Zl, r) || unicode.Is(unicode.Zp, r)) {
			return unicode.ReplacementChar
		}
		return r
	}, strings.ToValidUTF8(text, string(unicode.ReplacementChar)))
}

// PlainWriter applies Redact, if it is not nil, and then Plain to each text, and writes the result
// to To. Each text must consist of whole characters.
type PlainWriter struct {
	To     io.Writer
	Redact *strings.Replacer
}

// Write writes the plain text.
func (w PlainWriter) Write(text []byte) (int, error) {
	clean := string(text)
	if w.Redact != nil {
		clean = w.Redact.Replace(clean)
	}
	if _, err := io.WriteString(w.To, Plain(clean)); err != nil {
		return 0, err
	}
	return len(text), nil
}

// A change of latency is reported only if it reaches these limits.
const (
	// Each report needs enoughCalls calls of the operation.
	enoughCalls = 20
	// The larger median is at least muchSlower times the smaller one, and differs from it by at least
	// muchLater milliseconds.
	muchSlower = 1.5
	muchLater  = 1.0
)

// Diff compares two reports, of which A is the earlier one. The text is for a terminal: the
// verdict, the facts, the results (the worsened first), the latencies, and whether B is worse.
//
// B is worse if the verdict, a result or its extent got worse, if B left more objects behind, or if
// B has more findings of the [Witness]. B is also worse if it has a failed result that A lacks, or
// if it lacks a passed result of A although B selected that result's group. Latencies do not count,
// because they depend on the other users of the rack.
func Diff(a, b *Report) (text string, worse bool) {
	results, worse := diffResults(a, b)
	fromBest := []Verdict{Conforms, BlockedByRack, Incomplete, InterruptedRun, DoesNotConform}
	worse = worse || slices.Index(fromBest, b.Verdict) > slices.Index(fromBest, a.Verdict) ||
		len(b.Ledger.Left) > len(a.Ledger.Left) || len(b.Witness.Findings) > len(a.Witness.Findings)
	not := "not "
	if worse {
		not = ""
	}
	return diffFacts(a, b) + "\n" + results + "\n" + diffCalls(a, b) + "\nB is " + not +
		"worse than A.\n", worse
}

func diffFacts(a, b *Report) string {
	var text strings.Builder
	if a.Verdict == b.Verdict {
		fmt.Fprintf(&text, "Verdict: %s in both\n", a.Verdict)
	} else {
		fmt.Fprintf(&text, "Verdict: %s in A, %s in B\n", a.Verdict, b.Verdict)
	}
	tools := map[string]string{}
	maps.Copy(tools, a.Versions.Tools)
	maps.Copy(tools, b.Versions.Tools)
	names := slices.Sorted(maps.Keys(tools))
	of := b.facts(names)
	for i, fact := range a.facts(names) {
		if fact != of[i] {
			fmt.Fprintf(&text, "  %-24s %s -> %s\n", oneLine(fact.Name),
				cmp.Or(oneLine(fact.Value), "none"), cmp.Or(oneLine(of[i].Value), "none"))
		}
	}
	return text.String()
}

type fact struct{ Name, Value string }

func (r *Report) facts(tools []string) []fact {
	all := []fact{{"host", r.Rack.Host}, {"project", r.Rack.Project},
		{"API version", r.Rack.APIVersion}, {"release", r.Rack.Release},
		{"hot-plug", string(r.Rack.HotPlug)}, {"simulated", fmt.Sprint(r.Rack.Simulated)},
		{"suite", r.Versions.Suite}, {"driver", r.Versions.Driver}, {"SDK", r.Versions.SDK},
		{"Go", r.Versions.Go}, {"kernel", r.Versions.Kernel},
		{"system", r.Versions.OS + " " + r.Versions.Arch}}
	for _, tool := range tools {
		all = append(all, fact{tool, r.Versions.Tools[tool]})
	}
	return append(all, fact{"machine", r.Run.Machine}, fact{"second instance", r.Run.Second},
		fact{"helper instance", r.Run.Helper}, fact{"groups", strings.Join(r.Run.Selected, ", ")},
		fact{"budget", r.Run.Budget}, fact{"objects left", fmt.Sprint(len(r.Ledger.Left))},
		fact{"findings of the witness", fmt.Sprint(len(r.Witness.Findings))})
}

// oneLine joins the lines, and replaces characters that could change the terminal's state.
func oneLine(s string) string {
	clean := strings.Map(func(c rune) rune {
		if unicode.IsPrint(c) {
			return c
		}
		return ' '
	}, s)
	return strings.Join(strings.Fields(clean), " ")
}

const less, inA, inB = "looked at less", "in A alone", "in B alone"

// diffResults lists the changed results. If A lacks a whole group, it lists only the failures of
// the group and counts the rest. If B did not select a group, it only counts the group's results.
func diffResults(a, b *Report) (text string, worse bool) {
	same, sections := 0, map[string][]string{}
	add := func(section string, r Result, words ...string) {
		sections[section] = append(sections[section],
			fmt.Sprintf("    %s:%s\n", oneLine(r.title()), strings.Join(words, "")))
	}
	groups := map[string]map[string]int{inA: {}, inB: {}}
	before, groupsA, groupsB := map[[2]string]Result{}, map[string]bool{}, map[string]bool{}
	for _, result := range a.Results {
		before[result.key()] = result
		groupsA[result.Group] = true
	}
	for _, now := range b.Results {
		then, both := before[now.key()]
		delete(before, now.key())
		groupsB[now.Group] = true
		switch {
		case !both && !groupsA[now.Group] && now.Status != Failed:
			groups[inB][now.Group]++
		case !both:
			add(inB, now, " ", now.Status.words())
			worse = worse || now.Status == Failed
		case then.Status == now.Status:
			same++
			if shrunk := then.Extent.Shrunk(now.Extent); len(shrunk) > 0 {
				add(less, now, "\n      ", oneLine(strings.Join(shrunk, "; ")))
				worse = worse || a.Rack.Simulated == b.Rack.Simulated // a real rack has smaller extents
			}
		default:
			section, reason := changeOf(then.Status, now.Status), oneLine(now.Reason)
			worse = worse || section == "worse"
			if reason != "" {
				reason = "\n      " + reason
			}
			add(section, now, " ", then.Status.words(), " -> ", now.Status.words(), reason)
		}
	}
	for _, result := range a.Results {
		switch _, gone := before[result.key()]; {
		case gone && !groupsB[result.Group] && !slices.Contains(b.Run.Selected, result.Group):
			groups[inA][result.Group]++
		case gone:
			add(inA, result, " ", result.Status.words())
			worse = worse || result.Status == Passed
		}
	}
	changed, better := len(sections["otherwise changed"]), len(sections["better"])
	both := same + len(sections["worse"]) + better + changed
	text = fmt.Sprintf("Results: %d in A, %d in B\n  %d in both: %d the same, %d worse, %d better, "+
		"%d otherwise changed\n  %d in A alone, %d in B alone\n", len(a.Results), len(b.Results), both,
		same, len(sections["worse"]), better, changed, len(a.Results)-both, len(b.Results)-both)
	return text + listed(sections, groups), worse
}

// listed returns the text of all sections. Each section begins with the counts of its groups.
func listed(sections map[string][]string, groups map[string]map[string]int) (text string) {
	for _, section := range []string{"worse", "better", "otherwise changed", less, inB, inA} {
		if len(sections[section])+len(groups[section]) > 0 {
			text += "  " + section + ":\n"
		}
		for _, group := range slices.Sorted(maps.Keys(groups[section])) {
			text += fmt.Sprintf("    all of %s: %d\n", oneLine(group), groups[section][group])
		}
		text += strings.Join(sections[section], "")
	}
	return text
}

func changeOf(then, now Status) (section string) {
	switch {
	case now == Failed || then == Passed:
		return "worse"
	case now == Passed:
		return "better"
	}
	return "otherwise changed" // a result without a test does not show an improvement
}

func diffCalls(a, b *Report) string {
	type change struct {
		ratio float64
		text  string
	}
	before := map[string]Calls{}
	for _, calls := range a.Calls {
		before[string(calls.Kind)+" "+calls.Operation] = calls
	}
	var changes []change
	compared, tooFew, oneSided := 0, 0, 0
	for _, now := range b.Calls {
		k := string(now.Kind) + " " + now.Operation
		then, both := before[k]
		delete(before, k)
		switch {
		case !both:
			oneSided++
			continue
		case min(then.Count, now.Count) < enoughCalls:
			tooFew++
			continue
		}
		p50, p50Now := then.Quantile(0.5), now.Quantile(0.5)
		compared++
		if max(p50, p50Now) < muchSlower*min(p50, p50Now) || math.Abs(p50Now-p50) < muchLater {
			continue
		}
		word := "slower"
		if p50Now < p50 {
			word = "faster"
		}
		changes = append(changes, change{p50Now / p50, fmt.Sprintf(
			"  %s %s: %s, p50 %s -> %s (ratio %.2f; %d and %d calls)\n", now.Kind,
			oneLine(now.Operation), word, inMilliseconds(p50), inMilliseconds(p50Now), p50Now/p50,
			then.Count, now.Count)})
	}
	slices.SortStableFunc(changes, func(x, y change) int {
		return cmp.Compare(y.ratio, x.ratio) // the largest slowdown first
	})
	text := fmt.Sprintf("Latencies: the p50 of %d of %s changed by a factor of %g or more\n"+
		"  not compared: %d with fewer than %d calls in a report, %d in one report alone\n",
		len(changes), plural(compared, "operation"), muchSlower, tooFew, enoughCalls,
		oneSided+len(before))
	for _, change := range changes {
		text += change.text
	}
	return text
}
