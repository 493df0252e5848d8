//! Data sets of every source, and the errors for invalid files and requests.

use super::*;
use foretell_units::diagnostic::one_line;
use std::path::Path;

fn image(channels: usize, side: usize, classes: usize) -> SampleShape {
    SampleShape::Image { channels, height: side, width: side, classes }
}

fn open_path(path: &Path, shape: &SampleShape) -> Result<Dataset, DataError> {
    Dataset::open(&DataSource::Path(path.to_path_buf()), shape, 0)
}

fn refused(path: &Path, shape: &SampleShape) -> String {
    one_line(&open_path(path, shape).unwrap_err())
}

fn images_of(data: &Dataset, split: Split, indices: &[usize]) -> Vec<f32> {
    let mut out = vec![f32::NAN; indices.len() * data.sample_size()];
    data.fill_images(split, 0, indices, &mut out).unwrap();
    out
}

fn labels_of(data: &Dataset, split: Split, indices: &[usize]) -> Vec<i32> {
    let mut out = vec![-9; indices.len()];
    data.fill_labels(split, indices, &mut out).unwrap();
    out
}

#[test]
fn the_shipped_digits_are_complete_normalised_and_split_by_class() {
    let data = Dataset::open(&DataSource::Digits, &image(1, 8, 10), 1).unwrap();
    assert_eq!((data.len(Split::Training), data.len(Split::Evaluation)), (1433, 364));
    assert_eq!(data.steps_per_epoch(64), Ok(22));
    let all: Vec<usize> = (0..1433).collect();
    let pixels = images_of(&data, Split::Training, &all);
    let mean = pixels.iter().map(|&value| f64::from(value)).sum::<f64>() / pixels.len() as f64;
    let variance = pixels.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>() / pixels.len() as f64;
    assert!(mean.abs() < 1e-6 && (variance - 1.0).abs() < 1e-6, "{mean} {variance}");
    let evaluation: Vec<usize> = (0..364).collect();
    let labels = labels_of(&data, Split::Evaluation, &evaluation);
    for class in 0..10 {
        assert!((35..=37).contains(&labels.iter().filter(|&&label| label == class).count()));
    }
}

#[test]
fn class_means_classify_the_digits() {
    let data = Dataset::open(&DataSource::Digits, &SampleShape::Features { width: 64, classes: 10 }, 1).unwrap();
    let mut means = vec![([0.0_f32; 64], 0.0_f32); 10];
    for index in 0..1433 {
        let (sum, count) = &mut means[labels_of(&data, Split::Training, &[index])[0] as usize];
        sum.iter_mut().zip(images_of(&data, Split::Training, &[index])).for_each(|(sum, value)| *sum += value);
        *count += 1.0;
    }
    let right = (0..364).filter(|&index| {
        let pixels = images_of(&data, Split::Evaluation, &[index]);
        let distance = |class: &usize| {
            let (sum, count) = &means[*class];
            sum.iter().zip(&pixels).map(|(sum, pixel)| (sum / count - pixel).powi(2)).sum::<f32>()
        };
        let nearest = (0..10).min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap();
        nearest as i32 == labels_of(&data, Split::Evaluation, &[index])[0]
    });
    assert!(right.count() > 310);
}

#[test]
fn any_number_of_ranks_sees_the_same_bytes() {
    let sources = [DataSource::Digits, DataSource::Synthetic];
    for source in sources {
        let whole = Dataset::open(&source, &image(3, 28, 10), 5).unwrap();
        let batch = whole.epoch_order(2).batch(1, 12).unwrap();
        let all = images_of(&whole, Split::Training, &batch);
        let labels = labels_of(&whole, Split::Training, &batch);
        for ranks in [2, 3, 4] {
            let mut gathered = (Vec::new(), Vec::new());
            for rank in 0..ranks {
                let own = Dataset::open(&source, &image(3, 28, 10), 5).unwrap();
                let indices = own.epoch_order(2).batch(1, 12).unwrap();
                let part = indices.chunks(12 / ranks).nth(rank).unwrap();
                gathered.0.extend(images_of(&own, Split::Training, part));
                gathered.1.extend(labels_of(&own, Split::Training, part));
            }
            assert_eq!(gathered, (all.clone(), labels.clone()));
        }
    }
}

#[test]
fn evaluation_visits_every_sample_once_and_ignores_padding() {
    let data = Dataset::open(&DataSource::Digits, &image(1, 8, 10), 1).unwrap();
    assert_eq!((data.evaluation_batches(100), data.evaluation_batches(0)), (4, 0));
    let labels: Vec<i32> =
        (0..4).flat_map(|batch| labels_of(&data, Split::Evaluation, &data.evaluation_indices(batch, 100).unwrap())).collect();
    assert_eq!(labels.iter().filter(|&&label| label != IGNORED_LABEL).count(), 364);
    assert!(labels[364..].iter().all(|&label| label == IGNORED_LABEL));
    assert_eq!(images_of(&data, Split::Evaluation, &[PADDING]), vec![0.0; 64]);
}

#[test]
fn tokens_of_the_shipped_text_spell_it() {
    let data = Dataset::open(&DataSource::Text, &SampleShape::Tokens { sequence: 64, vocabulary: 256 }, 1).unwrap();
    let (mut tokens, mut labels) = (vec![0; 128], vec![0; 128]);
    data.fill_tokens(Split::Training, &[0, PADDING], &mut tokens, &mut labels).unwrap();
    let text: String = tokens[..64].iter().map(|&token| char::from(token as u8)).collect();
    assert!(text.starts_with("MIT License"), "{text}");
    assert_eq!(tokens[1..64], labels[..63]);
    assert!(tokens[64..].iter().all(|&token| token == 0) && labels[64..].iter().all(|&label| label == IGNORED_LABEL));
    assert!(data.len(Split::Training) > 2000 && data.len(Split::Evaluation) > 10);
}

#[test]
fn a_folder_of_mnist_files_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, dimensions: &[u32], elements: &[u8]| {
        std::fs::write(folder.path().join(name), idx::tests::file(dimensions, elements)).unwrap();
    };
    write("train-images-idx3-ubyte", &[3, 2, 2], &[0, 2, 0, 2, 2, 0, 2, 0, 0, 0, 2, 2]);
    write("train-labels-idx1-ubyte", &[3], &[0, 1, 2]);
    write("t10k-images.idx3-ubyte", &[1, 2, 2], &[2, 2, 0, 2]);
    assert!(refused(folder.path(), &image(1, 2, 3)).contains("lacks the file `t10k-labels-idx1-ubyte`"));
    write("t10k-labels.idx1-ubyte", &[1], &[2]);
    let data = open_path(folder.path(), &image(1, 2, 3)).unwrap();
    assert_eq!((data.len(Split::Training), data.len(Split::Evaluation)), (3, 1));
    assert_eq!(images_of(&data, Split::Evaluation, &[0]), [1.0, 1.0, -1.0, 1.0]);
    assert_eq!(labels_of(&data, Split::Training, &[2, 0]), [2, 0]);
    assert!(refused(folder.path(), &image(1, 2, 2)).contains("hint: give the model at least 3 classes"));
    let path = folder.path().join("train-images-idx3-ubyte");
    std::fs::write(&path, [0, 0, 8, 3, 0, 0]).unwrap();
    let message = refused(folder.path(), &image(1, 2, 3));
    assert!(message.starts_with(&format!("`{}` is cut short", path.display())), "{message}");
    assert!(refused(&path, &image(1, 2, 3)).contains("hint: for images give the folder"));
}

#[test]
fn folders_of_cifar_files_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: Vec<u8>| std::fs::write(folder.path().join(name), bytes).unwrap();
    write("data_batch_1.bin", [cifar::tests::record(&[1]), cifar::tests::record(&[2])].concat());
    write("data_batch_3.bin", cifar::tests::record(&[9]));
    assert!(refused(folder.path(), &image(3, 32, 10)).contains("lacks the file `test_batch.bin`"));
    write("test_batch.bin", cifar::tests::record(&[4]));
    let data = open_path(folder.path(), &image(3, 32, 10)).unwrap();
    assert_eq!(labels_of(&data, Split::Training, &[0, 1, 2]), [1, 2, 9]);
    assert_eq!(labels_of(&data, Split::Evaluation, &[0]), [4]);
    assert!(refused(folder.path(), &image(1, 32, 10)).contains("hint: give the model 3 input channels"));

    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("train.bin"), cifar::tests::record(&[0, 77])).unwrap();
    std::fs::write(folder.path().join("test.bin"), cifar::tests::record(&[0, 5])).unwrap();
    let data = open_path(folder.path(), &SampleShape::Features { width: 3072, classes: 100 }).unwrap();
    assert_eq!(labels_of(&data, Split::Training, &[0]), [77]);
}

#[test]
fn token_files_are_read_by_their_ending() {
    let folder = tempfile::tempdir().unwrap();
    let shape = SampleShape::Tokens { sequence: 2, vocabulary: 300 };
    let (text, words) = (folder.path().join("a.txt"), folder.path().join("a.bin"));
    std::fs::write(&text, "abcdefgh").unwrap();
    std::fs::write(&words, (290_u16..298).flat_map(u16::to_le_bytes).collect::<Vec<u8>>()).unwrap();
    for (path, expected) in [(text, [97, 98, 99]), (words, [290, 291, 292])] {
        let data = open_path(&path, &shape).unwrap();
        let (mut tokens, mut labels) = ([0; 2], [0; 2]);
        data.fill_tokens(Split::Training, &[0], &mut tokens, &mut labels).unwrap();
        assert_eq!((tokens, labels), ([expected[0], expected[1]], [expected[1], expected[2]]));
    }
}

#[test]
fn paths_without_data_are_refused_with_a_hint() {
    let folder = tempfile::tempdir().unwrap();
    let shape = image(1, 8, 10);
    assert!(refused(folder.path(), &shape).contains("contains no data of a known format; hint: give the folder"));
    std::fs::write(folder.path().join("train-images-idx3-ubyte.gz"), [0x1f, 0x8b]).unwrap();
    assert!(refused(folder.path(), &shape).contains("hint: unpack its files with `gunzip`"));
    let message = refused(Path::new("digts"), &shape);
    assert_eq!(
        message,
        "there is no file or folder `digts`; hint: the data is `digits`, `text`, `synthetic`, or the path of a file or folder"
    );
    std::os::unix::fs::symlink("/dev/zero", folder.path().join("endless.txt")).unwrap();
    assert!(refused(&folder.path().join("endless.txt"), &shape).contains("not a regular file"));
    let large = std::fs::File::create(folder.path().join("large.bin")).unwrap();
    large.set_len(1 << 40).unwrap();
    let tokens = SampleShape::Tokens { sequence: 2, vocabulary: 300 };
    assert!(refused(&folder.path().join("large.bin"), &tokens).contains("windows, more than are shuffled at once"));
    std::fs::write(folder.path().join("empty.txt"), "").unwrap();
    assert!(refused(&folder.path().join("empty.txt"), &tokens).contains("hint: use a longer text"));
}

#[test]
fn shapes_out_of_range_are_refused_for_every_source() {
    let shapes = [
        image(0, 8, 10),
        image(1, 8, 0),
        image(1, usize::MAX, 10),
        image(1, 8, usize::MAX),
        SampleShape::Features { width: 0, classes: 10 },
        SampleShape::Features { width: usize::MAX, classes: 10 },
        SampleShape::Tokens { sequence: 0, vocabulary: 10 },
        SampleShape::Tokens { sequence: usize::MAX, vocabulary: 10 },
        SampleShape::Tokens { sequence: 8, vocabulary: 0 },
    ];
    for shape in shapes {
        for source in [DataSource::Digits, DataSource::Text, DataSource::Synthetic] {
            let message = one_line(&Dataset::open(&source, &shape, 0).unwrap_err());
            assert!(message.contains("hint: every size is at least 1"), "{message}");
        }
    }
}

#[test]
fn invalid_requests_are_refused_before_anything_is_written() {
    let digits = Dataset::open(&DataSource::Digits, &image(1, 8, 10), 1).unwrap();
    let mut out = vec![5.0; 64];
    assert!(matches!(digits.fill_images(Split::Training, 0, &[1433], &mut out), Err(DataError::SampleOutOfRange { .. })));
    assert!(matches!(digits.fill_images(Split::Training, 0, &[0, 1], &mut out), Err(DataError::BufferSize { needed: 128, .. })));
    assert!(matches!(digits.fill_labels(Split::Training, &[0], &mut []), Err(DataError::BufferSize { .. })));
    assert!(matches!(digits.fill_tokens(Split::Training, &[], &mut [], &mut []), Err(DataError::WrongKind { .. })));
    assert_eq!(out, vec![5.0; 64]);
    assert!(one_line(&digits.steps_per_epoch(1434).unwrap_err()).contains("hint: use a global batch from 1 to 1433"));
    let text = Dataset::open(&DataSource::Text, &SampleShape::Tokens { sequence: 8, vocabulary: 128 }, 1).unwrap();
    assert!(matches!(text.fill_images(Split::Training, 0, &[], &mut []), Err(DataError::WrongKind { .. })));
    assert!(matches!(text.fill_labels(Split::Training, &[], &mut []), Err(DataError::WrongKind { .. })));
    assert!(matches!(text.fill_tokens(Split::Training, &[0], &mut [0; 8], &mut [0; 7]), Err(DataError::BufferSize { .. })));
}

fn skipping() -> InputOptions {
    InputOptions { on_bad_sample: OnBadSample::Skip, ..InputOptions::default() }
}

fn open_skipping(path: &Path, shape: &SampleShape) -> Dataset {
    Dataset::open_with(&DataSource::Path(path.to_path_buf()), shape, 0, &skipping()).unwrap()
}

#[test]
fn bad_images_of_idx_and_cifar_files_are_left_out_and_counted() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(folder.path().join(name), bytes).unwrap();
    // Two whole images of three, the second with a label that the model does not have.
    write("train-images-idx3-ubyte", &idx::tests::file(&[3, 1, 2], &[0, 2, 2, 0, 1]));
    write("train-labels-idx1-ubyte", &idx::tests::file(&[3], &[0, 5, 1]));
    write("t10k-images-idx3-ubyte", &idx::tests::file(&[1, 1, 2], &[2, 0]));
    write("t10k-labels-idx1-ubyte", &idx::tests::file(&[1], &[1]));
    let shape = SampleShape::Image { channels: 1, height: 1, width: 2, classes: 2 };
    assert!(refused(folder.path(), &shape).contains("declares 3 x 1 x 2 bytes but holds 5"));
    let data = open_skipping(folder.path(), &shape);
    assert_eq!((data.len(Split::Training), data.len(Split::Evaluation), data.bad_samples()), (1, 1, 2));
    assert_eq!(images_of(&data, Split::Training, &[0]), [-1.0, 1.0]);

    let folder = tempfile::tempdir().unwrap();
    let records = [cifar::tests::record(&[1]), cifar::tests::record(&[77]), cifar::tests::record(&[2])].concat();
    std::fs::write(folder.path().join("data_batch_1.bin"), &records[..records.len() - 1]).unwrap();
    std::fs::write(folder.path().join("test_batch.bin"), cifar::tests::record(&[4])).unwrap();
    let data = open_skipping(folder.path(), &image(3, 32, 10));
    assert_eq!((labels_of(&data, Split::Training, &[0]), data.bad_samples()), (vec![1], 2));
}

/// Fills one window of a file of tokens, and returns whether it was replaced.
fn window(data: &Dataset, split: Split, index: usize) -> Result<(Vec<i32>, bool), DataError> {
    let (mut tokens, mut labels) = (vec![0; data.sample_size()], vec![0; data.sample_size()]);
    let replaced = data.fill_tokens(split, &[index], &mut tokens, &mut labels)?;
    tokens.push(*labels.last().unwrap());
    Ok((tokens, !replaced.is_empty()))
}

fn write_tokens(path: &Path, vocabulary: usize, tokens: impl Iterator<Item = u32>) {
    let mut writer = TokenFileWriter::create(path, vocabulary).unwrap();
    writer.push(&tokens.collect::<Vec<_>>()).unwrap();
    writer.finish().unwrap();
}

#[test]
fn token_files_of_both_widths_read_back_and_every_cut_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    for (vocabulary, first, bytes) in [(65_536, 65_000, 2), (65_537, 65_500, 4)] {
        let path = folder.path().join("corpus.tokens");
        write_tokens(&path, vocabulary, (0..30).map(|number| first + number));
        let whole = std::fs::read(&path).unwrap();
        assert_eq!(whole.len(), 64 + 30 * bytes);
        let shape = SampleShape::Tokens { sequence: 3, vocabulary: 70_000 };
        let data = open_path(&path, &shape).unwrap();
        let expected = |start: u32| (start..start + 4).map(|number| (first + number) as i32).collect::<Vec<_>>();
        assert_eq!(window(&data, Split::Training, 5), Ok((expected(5), false)));
        assert_eq!(window(&data, Split::Evaluation, 0), Ok((expected(26), false)));
        // Its first bytes say what it is, whatever its name.
        let other = folder.path().join("corpus.bin");
        std::fs::rename(&path, &other).unwrap();
        assert_eq!(window(&open_path(&other, &shape).unwrap(), Split::Training, 5), Ok((expected(5), false)));
        std::fs::rename(&other, &path).unwrap();
        // The header says what the vocabulary must be.
        let small = SampleShape::Tokens { sequence: 3, vocabulary: first as usize + 29 };
        assert!(refused(&path, &small).contains(&format!("vocabulary of at least {}", first + 30)));
        for length in 0..whole.len() {
            std::fs::write(&path, &whole[..length]).unwrap();
            let message = refused(&path, &shape);
            assert!(message.starts_with(&format!("`{}` ", path.display())) && message.contains("hint: "), "{message}");
        }
        // What is left of it is used if bad samples are skipped.
        std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
        let data = open_skipping(&path, &shape);
        assert_eq!((data.bad_samples(), window(&data, Split::Evaluation, 0)), (1, Ok((expected(25), false))));
    }
    // Nothing stays of a file that was not finished.
    let path = folder.path().join("other.tokens");
    TokenFileWriter::create(&path, 10).unwrap().push(&[1, 2]).unwrap();
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    assert!(TokenFileWriter::create(&path, 10).unwrap().push(&[1 << 16]).is_err());
}

#[test]
fn shards_of_a_folder_are_one_stream_and_windows_cross_their_borders() {
    let folder = tempfile::tempdir().unwrap();
    let shape = SampleShape::Tokens { sequence: 4, vocabulary: 1000 };
    write_tokens(&folder.path().join("b.tokens"), 1000, 10..13);
    std::fs::write(folder.path().join("c.u32"), (13..40_u32).flat_map(u32::to_le_bytes).collect::<Vec<u8>>()).unwrap();
    write_tokens(&folder.path().join("a.tokens"), 100_000, 0..10);
    let data = open_path(folder.path(), &shape).unwrap();
    assert_eq!(data.len(Split::Training), 31);
    for index in 0..31 {
        assert_eq!(window(&data, Split::Training, index), Ok(((index as i32..index as i32 + 5).collect(), false)));
    }
    // A shard for evaluation replaces the last tenth.
    write_tokens(&folder.path().join("validation.tokens"), 1000, 500..510);
    let data = open_path(folder.path(), &shape).unwrap();
    assert_eq!((data.len(Split::Training), data.len(Split::Evaluation)), (36, 2));
    assert_eq!(window(&data, Split::Training, 35), Ok(((35..40).collect(), false)));
    assert_eq!(window(&data, Split::Evaluation, 1), Ok(((504..509).collect(), false)));
}

#[test]
fn a_token_beyond_the_vocabulary_names_its_file_or_its_window_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("corpus.bin");
    let tokens = (0..60_u16).map(|number| if number == 7 { 999 } else { number });
    std::fs::write(&path, tokens.flat_map(u16::to_le_bytes).collect::<Vec<u8>>()).unwrap();
    let shape = SampleShape::Tokens { sequence: 2, vocabulary: 60 };
    let message = refused(&path, &shape);
    assert!(message.contains(&format!("`{}` does not fit the model: it has the token 999", path.display())), "{message}");
    let data = open_skipping(&path, &shape);
    assert_eq!(window(&data, Split::Training, 4), Ok((vec![4, 5, 6], false)));
    for index in 5..=7 {
        assert_eq!(window(&data, Split::Training, index), Ok((vec![8, 9, 10], true)));
    }
}

/// The index of one sequence per length.
fn megatron_index(code: u8, bytes: u64, lengths: &[u32]) -> Vec<u8> {
    let mut index = b"MMIDIDX\0\0".to_vec();
    index.extend(1_u64.to_le_bytes());
    index.push(code);
    index.extend((lengths.len() as u64).to_le_bytes());
    index.extend((lengths.len() as u64 + 1).to_le_bytes());
    lengths.iter().for_each(|length| index.extend(length.to_le_bytes()));
    let starts = lengths.iter().scan(0_u64, |start, &length| {
        let own = *start;
        *start += u64::from(length) * bytes;
        Some(own)
    });
    starts.for_each(|start| index.extend(start.to_le_bytes()));
    (0..=lengths.len() as u64).for_each(|document| index.extend(document.to_le_bytes()));
    index
}

#[test]
fn megatrons_pairs_are_read_by_any_of_their_names() {
    let folder = tempfile::tempdir().unwrap();
    let shape = SampleShape::Tokens { sequence: 3, vocabulary: 100 };
    let path = |name: &str| folder.path().join(name);
    for (code, bytes) in [(8, 2), (4, 4)] {
        let tokens = (0..40_u32).flat_map(|token| token.to_le_bytes()[..bytes].to_vec());
        std::fs::write(path("c_text_document.bin"), tokens.collect::<Vec<u8>>()).unwrap();
        std::fs::write(path("c_text_document.idx"), megatron_index(code, bytes as u64, &[7, 30, 3])).unwrap();
        for name in ["c_text_document", "c_text_document.bin", "c_text_document.idx", ""] {
            let data = open_path(&path(name), &shape).unwrap();
            assert_eq!(window(&data, Split::Training, 6), Ok((vec![6, 7, 8, 9], false)), "{name}");
        }
    }
    let (index, tokens) = (path("c_text_document.idx"), path("c_text_document.bin"));
    std::fs::write(&tokens, [0; 159]).unwrap();
    let message = refused(&index, &shape);
    assert!(message.starts_with(&format!("`{}` holds 159 bytes, but its index declares 160", tokens.display())), "{message}");
    assert_eq!(open_skipping(&index, &shape).bad_samples(), 1);
    let whole = megatron_index(8, 2, &[7, 30, 3]);
    for length in 0..34 + 36 {
        std::fs::write(&index, &whole[..length]).unwrap();
        assert!(refused(&index, &shape).starts_with(&format!("`{}` is ", index.display())));
    }
    let mut apart = whole.clone();
    apart[34 + 12 + 8] += 2;
    std::fs::write(&index, apart).unwrap();
    assert!(refused(&index, &shape).contains("sequences that do not follow each other"));
    let mut floats = whole;
    floats[17] = 7;
    std::fs::write(&index, floats).unwrap();
    assert!(refused(&index, &shape).contains("has elements of the type 7"));
}
