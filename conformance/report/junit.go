package report

import (
	"encoding/xml"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// These are the elements of a JUnit report, as Jenkins, GitLab and GitHub's actions read them.
type (
	testSuites struct {
		XMLName xml.Name `xml:"testsuites"`
		Name    string   `xml:"name,attr"`
		junitCounts
		Suites []testSuite `xml:"testsuite"`
	}
	testSuite struct {
		Name string `xml:"name,attr"`
		junitCounts
		Timestamp string     `xml:"timestamp,attr"`
		Hostname  string     `xml:"hostname,attr"`
		Cases     []testCase `xml:"testcase"`
	}
	junitCounts struct {
		Tests    int    `xml:"tests,attr"`
		Failures int    `xml:"failures,attr"`
		Errors   int    `xml:"errors,attr"`
		Skipped  int    `xml:"skipped,attr"`
		Time     string `xml:"time,attr"`
	}
	testCase struct {
		Name      string        `xml:"name,attr"`
		Class     string        `xml:"classname,attr"`
		Time      string        `xml:"time,attr"`
		Failure   *junitMessage `xml:"failure"`
		Error     *junitMessage `xml:"error"`
		Skipped   *junitMessage `xml:"skipped"`
		SystemOut string        `xml:"system-out,omitempty"`
	}
	junitMessage struct {
		Message string `xml:"message,attr"`
		Text    string `xml:",chardata"`
	}
)

// junit renders a suite for each group, and a suite with the verdict, so that a run without any
// spec does not look like a success. Blocked and untested results are skipped, and interrupted
// ones are errors.
func junit(r *Report) ([]byte, error) {
	all := testSuites{Name: "oxide-conformance"}
	verdict := Result{Group: "verdict", Name: string(r.Verdict), Status: verdictStatus(r.Verdict),
		Reason: r.Why}
	seconds := 0.0
	for _, group := range append(r.Groups(), Group{Name: "verdict", Results: []Result{verdict}}) {
		suite := testSuite{Name: group.Name, Hostname: r.Run.Machine,
			Timestamp: r.Run.Began.UTC().Format(time.RFC3339)}
		for _, result := range group.Results {
			suite.addCase(result)
		}
		suite.Time = junitSeconds(group.Seconds())
		seconds += group.Seconds()
		all.add(suite.junitCounts)
		all.Suites = append(all.Suites, suite)
	}
	all.Time = junitSeconds(seconds)
	text, err := xml.MarshalIndent(all, "", "  ")
	return append([]byte(xml.Header), append(text, '\n')...), err
}

func (c *junitCounts) add(more junitCounts) {
	c.Tests += more.Tests
	c.Failures += more.Failures
	c.Errors += more.Errors
	c.Skipped += more.Skipped
}

// verdictStatus converts the verdict to the status of a spec.
func verdictStatus(v Verdict) Status {
	switch v {
	case Conforms:
		return Passed
	case BlockedByRack:
		return Blocked
	case DoesNotConform:
		return Failed
	}
	return Interrupted // and Incomplete
}

func (s *testSuite) addCase(result Result) {
	c := testCase{Name: result.Name, Class: result.Group, Time: junitSeconds(result.Seconds)}
	if result.ID != "" {
		c.Name = result.ID + " " + result.Name
	}
	s.Tests++
	for _, m := range result.Extent {
		c.SystemOut += m.String() + "\n"
	}
	switch result.Status {
	case Passed:
	case Blocked, NotTested, NotApplicable:
		s.Skipped++
		c.Skipped = &junitMessage{Message: result.Status.words() + ": " + result.Reason}
	case Failed:
		s.Failures++
		c.Failure = &junitMessage{Message: result.Reason, Text: evidenceText(result.Evidence)}
	default:
		s.Errors++
		c.Error = &junitMessage{Message: result.Status.words() + ": " + result.Reason,
			Text: evidenceText(result.Evidence)}
	}
	s.Cases = append(s.Cases, c)
}

func junitSeconds(seconds float64) string { return strconv.FormatFloat(seconds, 'f', 3, 64) }

// evidenceText returns evidence as plain text: a line for each exchange and a line for its answer.
func evidenceText(evidence []LoggedCall) string {
	var text strings.Builder
	for _, e := range evidence {
		fmt.Fprintf(&text, "%s: %s, %s\n", e.request(), e.outcome(), inMilliseconds(e.Milliseconds))
		if e.RequestID != "" {
			fmt.Fprintf(&text, "  request %s\n", e.RequestID)
		}
		if e.Answer != "" {
			fmt.Fprintf(&text, "  %s\n", strings.ReplaceAll(e.Answer, "\n", "\n  "))
		}
	}
	return text.String()
}
